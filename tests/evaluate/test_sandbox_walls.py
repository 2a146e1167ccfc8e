"""What generated code can read of us, and what it can take: as root and as a user, with bubblewrap and without."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.evaluate.scoring import cgroup, paths, sandbox
from unbroken.evaluate.scoring.sandbox import CommandEnd, SandboxLimits
from unbroken.evaluate.scoring.seccomp import seccomp_filter

USER = 64_123
"""Nobody of this machine."""
SECRET = "hf_planted_secret_0123456789"
MIB = 1 << 20


def as_user(work: Callable[[], Any]) -> Any:
    """What `work` returns in a child that is another, ordinary user, whose Python is the system's."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            os.chdir("/")
            os.environ["HOME"] = "/nonexistent"
            sys.executable = str(Path("/usr/bin/python3").resolve())
            os.write(theirs, json.dumps(work()).encode())
            code = 0
        except BaseException:  # noqa: BLE001  the parent fails with what is printed here
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as f:
        data = f.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the other user's part failed, see above"
    return json.loads(data)


def sandboxed(kind: str, code: str, **more: Any) -> dict[str, Any]:
    env = more.pop("env", {})
    out: CommandEnd = sandbox._run(
        kind,
        [sys.executable, "-I", "-S", "-c", code],
        SandboxLimits(**{"wall_s": 60.0, **more}),
        b"",
        {},
        (),
        env,
    )
    return {"status": out.status, "code": out.code, "out": out.stdout.decode(), "err": out.stderr.decode()}


class Box:
    """A kind of sandbox, used by root or by a user."""

    def __init__(self, kind: str, user: bool) -> None:
        self.kind, self.user = kind, user

    def __call__(self, code: str, **more: Any) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            return sandboxed(self.kind, code, **more)

        return as_user(work) if self.user else work()


@pytest.fixture(scope="module", params=["bubblewrap", "namespaces"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["ourselves", "another user"])
def box(request: pytest.FixtureRequest, kind: str) -> Box:
    user = request.param == "another user"
    if user and os.geteuid() != 0:
        pytest.skip("only root can become another user; the other half of this test is that user's")
    if user and not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("there is no Python that every user may read")
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    found = Box(kind, user)
    out = found("print('works')")
    if out["out"] != "works\n":
        pytest.skip(f"this machine lets {request.param} make no sandbox with {kind}: {out['err'][-200:]}")
    return found


LOOK = r"""
import glob, json, os
seen = {}
for place in sorted(glob.glob('/proc/[0-9]*')) + ['/proc/self', '/proc/thread-self']:
    for name in ('environ', 'cmdline', 'mountinfo', 'mounts', 'maps', 'auxv'):
        try: seen[place + '/' + name] = open(place + '/' + name, 'rb').read().decode('latin-1')
        except OSError: pass
    try:
        for fd in os.listdir(place + '/fd'):
            try: seen[place + '/fd/' + fd] = os.readlink(place + '/fd/' + fd)
            except OSError: pass
    except OSError: pass
for name in ('cmdline', 'keys', 'key-users', 'mounts', 'kallsyms'):
    try: seen['/proc/' + name] = open('/proc/' + name, 'rb').read(100000).decode('latin-1')
    except OSError: pass
for place in sorted(glob.glob('/proc/[0-9]*')):
    if place != '/proc/%d' % os.getpid():
        try:
            with open(place + '/mem', 'rb', 0) as mem:
                for line in open(place + '/maps'):
                    span, rights = line.split()[:2]
                    if 'r' in rights and '[v' not in line:
                        low, high = (int(x, 16) for x in span.split('-'))
                        try:
                            mem.seek(low); text = mem.read(min(high - low, 1 << 24))
                            if MARK.encode() in text: seen[place + '/mem'] = MARK
                        except (OSError, ValueError, OverflowError): pass
        except OSError: pass
print(json.dumps({'seen': seen, 'env': dict(os.environ), 'host': os.uname().nodename}))
"""


def test_nothing_of_the_host_can_be_read(box: Box, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    opened = tmp_path / SECRET
    opened.write_text(SECRET)
    fd = os.open(opened, os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        # The word is put together inside, so that the program's own text does not hold it.
        code = f"MARK = {SECRET[:8]!r} + {SECRET[8:]!r}\n" + LOOK
        out = box(code, env={"SEEN": "yes"}, output=8 * MIB)
    finally:
        os.close(fd)
    assert (out["status"], out["code"]) == ("done", 0), out["err"]
    told = json.loads(out["out"])
    assert SECRET not in json.dumps(told)
    assert set(told["env"]) == {"PATH", "HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "SEEN", "LC_CTYPE"} - (
        {"LC_CTYPE"} - set(told["env"])
    )  # fmt: skip
    seen = told["seen"]
    for place, text in seen.items():
        if place.endswith("/environ"):
            names = {v.partition("=")[0] for v in text.split("\0") if v}
            assert names <= {
                "PATH",
                "LANG",
                "PWD",
                "SEEN",
                "HOME",
                "OMP_NUM_THREADS",
                "OPENBLAS_NUM_THREADS",
            }, (place, text)
        if "/fd/" in place:
            assert text.startswith(("pipe:", "/proc", "socket:", "anon_inode:", "/dev/null")), (place, text)
    # Its own three pipes and nothing more; no process of the host; none of the host's mounts.
    own = sorted(t for p, t in seen.items() if p.startswith("/proc/self/fd/"))
    assert len([t for t in own if t.startswith("pipe:")]) == 3
    assert len([p for p in seen if p.endswith("/cmdline") and p[6].isdigit()]) <= 4
    host = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    inside = {line.split()[4] for line in seen["/proc/self/mountinfo"].splitlines()}
    assert not {
        m
        for m in host - {"/", "/proc", "/dev", "/tmp", "/dev/shm", "/dev/pts"}
        if m in inside and not m.startswith("/usr")
    }
    assert seen.get("/proc/cmdline", "") in ("", Path("/dev/null").read_text())
    assert told["host"] == "sandbox"


TRY = r"""
import ctypes, errno, json, os, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(result):
    return 'allowed' if result >= 0 else errno.errorcode[ctypes.get_errno()]
found = {}
found['user namespace'] = call(libc.unshare(0x10000000))
found['memfd'] = call(libc.memfd_create(b'x', 0))
found['mount'] = call(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))
found['ptrace'] = call(libc.ptrace(16, 1, None, None))
found['segment'] = call(libc.shmget(0, 4096, 0o1600))
if platform.machine() == 'x86_64':
    found['io_uring'] = call(libc.syscall(425, 8, 0))
    found['keyctl'] = call(libc.syscall(250, 0, -3, 1))
    stack = ctypes.create_string_buffer(1 << 16)
    found['clone'] = call(libc.syscall(56, 0x10000000 | 17, None, None, None, None))
try:
    socket.socket(40, socket.SOCK_STREAM); found['vsock'] = 'allowed'
except OSError as e: found['vsock'] = errno.errorcode[e.errno]
for place in ('/x', '/dev/x', '/proc/sys/kernel/hostname', '/inputs/x', '/usr/x'):
    try:
        open(place, 'w').write('x'); found[place] = 'allowed'
    except OSError as e: found[place] = 'refused'
try:
    import threading, subprocess
    t = threading.Thread(target=lambda: found.update(thread='allowed')); t.start(); t.join()
    found['process'] = subprocess.run(['true']).returncode
except Exception as e: found['process'] = repr(e)
print(json.dumps(found))
"""


def test_the_calls_that_open_other_doors_are_denied_and_the_usual_ones_are_not(box: Box) -> None:
    if isinstance(why := seccomp_filter(), str):
        pytest.skip(why)
    out = box(TRY)
    assert out["code"] == 0, out["err"]
    found = json.loads(out["out"])
    assert (found.pop("thread"), found.pop("process")) == ("allowed", 0)
    assert "allowed" not in found.values(), found
    assert {found[k] for k in ("user namespace", "mount", "ptrace")} == {"EPERM"}


FILL = r"""
import ctypes, mmap, os, sys
kept = []
def more(size):
    for i in range(size >> 20): yield b'x' * (1 << 20)
try:
    if HOW == 'memfd':
        fd = ctypes.CDLL(None).memfd_create(b'x', 0)
        if fd < 0: raise OSError('no memfd')
        for piece in more(TAKE): os.write(fd, piece)
    elif HOW == 'shared':
        m = mmap.mmap(-1, TAKE)
        for piece in more(TAKE): m.write(piece)
    else:
        for n, place in enumerate(('/tmp', '/dev/shm', '/sandbox', '/', '/dev', '/run', '/var/tmp')):
            try:
                with open(place + '/x', 'wb') as f:
                    for piece in more(TAKE): f.write(piece); f.flush()
            except OSError: pass
        raise OSError('bounded')
    print('took it all')
except (OSError, MemoryError) as e:
    print('refused')
"""


@pytest.mark.parametrize("how", ["memfd", "shared", "files"])
def test_memory_is_bounded_however_it_is_held(box: Box, how: str) -> None:
    take, memory, scratch = 400 * MIB, 128 * MIB, 16 * MIB
    code = f"HOW = {how!r}\nTAKE = {take}\n" + FILL
    out = box(code, memory=memory, scratch=scratch, address_space=1 << 40)
    assert "took it all" not in out["out"]
    assert out["status"] == "memory" or out["out"] == "refused\n", out


def test_a_control_group_counts_what_no_process_shows(kind: str) -> None:
    place = cgroup.parents()
    if isinstance(place, str):
        pytest.skip(f"no control group can be made here: {place}")
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    # Each within its own limit: only together are they too much, and no process has them resident.
    code = (
        "import os\nfor place in ('/tmp', '/dev/shm', '/sandbox'):\n  for n in range(3):\n"
        "    with open(f'{place}/{n}', 'wb') as f:\n      f.write(b'x' * (30 << 20))\nprint('took it all')"
    )
    out = sandboxed(kind, code, memory=64 * MIB, scratch=100 * MIB)
    assert out["status"] == "memory", out
    left = {
        p.name
        for f in {place.memory, place.pids or place.memory}
        for p in f.glob(f"{cgroup.PREFIX}{os.getpid()}-*")
    }
    assert not left


def test_groups_of_killed_starters_are_removed() -> None:
    place = cgroup.parents()
    if isinstance(place, str):
        pytest.skip(f"no control group can be made here: {place}")
    gone = place.memory / f"{cgroup.PREFIX}{(1 << 22) + 1}-0"
    gone.mkdir()
    cgroup.sweep(place)
    assert not gone.exists()


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "sandbox_kind", lambda: "bubblewrap")
    monkeypatch.setattr(cgroup, "parents", lambda: "nothing is delegated to this user")
    monkeypatch.setattr(sandbox, "seccomp_filter", lambda: "libseccomp is not installed")
    memory, calls = sandbox.weaknesses()
    assert "nothing is delegated" in memory and "libseccomp is not installed" in calls
    monkeypatch.setattr(sandbox, "sandbox_kind", lambda: "none: bubblewrap: not found")
    assert "not run" in sandbox.weaknesses()[0]


def test_what_never_started_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "sandbox_kind", lambda: "namespaces")
    monkeypatch.setattr(sandbox, "_CONFINE", Path("/nonexistent/confine.py"))
    with pytest.raises(sandbox.SandboxUnavailable, match="did not start"):
        sandbox.run(["true"])


# ------------------------------------------------------------------------------------------------ home folders


@pytest.mark.parametrize("where", ["home", "home/.local", "above"])
def test_a_home_folder_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    home = tmp_path / "people" / "ada"
    prefix = {"home": home, "home/.local": home / ".local", "above": tmp_path / "people"}[where]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for folder in (home / ".ssh", prefix / "bin", prefix / "lib" / version / "site-packages"):
        folder.mkdir(parents=True, exist_ok=True)
    (prefix / "pyvenv.cfg").write_text("")
    python = prefix / "bin" / "python3"
    python.symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("HOME", str(home))
    for name in ("prefix", "exec_prefix"):
        monkeypatch.setattr(sys, name, str(prefix))
    monkeypatch.setattr(sys, "executable", str(python))
    shown = paths.python_paths()
    assert {str(python), str(prefix / "lib" / version), str(prefix / "pyvenv.cfg")} <= set(shown)
    for path in map(Path, shown):
        assert not (home == path or path in home.parents or path in (home / ".ssh").parents), path
        assert path != home / ".local"


def test_who_asks_for_a_home_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    monkeypatch.setattr(sandbox, "sandbox_kind", lambda: "namespaces")
    for path in (tmp_path / "ada", tmp_path, Path("/")):
        with pytest.raises(sandbox.SandboxUnavailable, match="home folder"):
            sandbox.run(["true"], readable=[path])


# ------------------------------------------------------------------------------------- without a control group

UNCOUNTED = {
    "shared memory that was given back": (
        "import mmap, time\nheld = []\nfor _ in range(8):\n  m = mmap.mmap(-1, 32 << 20)\n"
        "  for at in range(0, len(m), 4096):\n    m[at] = 1\n  m.madvise(mmap.MADV_DONTNEED)\n  held.append(m)\n"
        "  time.sleep(0.25)\nprint('took it all')"
    ),
    "buffers of sockets": (
        "import socket\nheld, n = [], 0\nfor _ in range(100):\n  a, b = socket.socketpair()\n  a.setblocking(False)\n"
        "  a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)\n  held += [a, b]\n"
        "  try:\n    while True:\n      n += a.send(b'x' * 65536)\n  except BlockingIOError:\n    pass\n"
        "print('took it all' if n > 100 << 20 else 'refused')"
    ),
}


@pytest.mark.parametrize("how", UNCOUNTED)
def test_without_a_control_group_no_memory_is_held_that_nobody_counts(
    box: Box, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(seccomp_filter(), str):
        pytest.skip(str(seccomp_filter()))
    monkeypatch.setattr(cgroup, "parents", lambda: "none can be made")
    out = box(UNCOUNTED[how], memory=64 * MIB, cpu_s=20.0)
    assert "took it all" not in out["out"]
    assert out["status"] == "memory" or out["out"] == "refused\n", out


def test_the_system_s_alternatives_can_be_read(box: Box) -> None:
    out = box("import os\nprint(sorted(os.listdir('/etc')))")
    assert "ld.so.cache" in out["out"], out
