"""Runs a command that nobody trusts: no network, no files of ours, limits on memory, time, processes and output.

Two ways, tried in this order and probed before the first use:

* bubblewrap (`bwrap`), as root or as a user.
* Linux namespaces made by ourselves (confine.py), where bubblewrap is missing but the kernel lets a user have them.

Where neither works nothing is run: `SandboxUnavailable` says what to install. Inside there is a read-only system,
an empty /tmp and a throw-away working folder of limited size, both gone afterwards; a process id space of its own,
so that nothing survives; and, when we are root, another user. Whatever runs there, and bubblewrap itself, starts from
an environment of two variables, and is told what to do through pipes: nothing of ours can be read in /proc.

Two more walls stand where the machine has them (`weaknesses` says which are missing): a filter of system calls
(seccomp.py), and a control group, which alone counts all memory (cgroup.py). docs/security.md has the numbers.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

from ...errors import EvaluationError
from . import cgroup
from .paths import is_home, outermost, python_paths
from .seccomp import seccomp_filter

HOME = "/sandbox"
"""The working folder inside."""
_PREFIX = "unbroken-sandbox-"
_CONFINE = Path(__file__).with_name("confine.py")
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
"""All that bubblewrap and the first process inside start with: /proc shows it to whatever runs there."""
_MASKED = ("cmdline", "config.gz", "kallsyms", "kcore", "key-users", "keys", "kmsg", "sched_debug", "sysrq-trigger",
           "timer_list", "version_signature")  # fmt: skip
"""Files of /proc that speak of the machine and not of the sandbox: its kernel's command line, keys, addresses."""
UNSTARTED = "unstarted"
"""The status of a command that was never begun."""


class SandboxUnavailable(EvaluationError):
    """Generated code cannot be run safely on this machine."""


@dataclass(frozen=True)
class SandboxLimits:
    """What a command may take."""

    cpu_s: float = 10.0
    """Processor time of each process: the limit that is the same on a slow or busy machine."""
    wall_s: float = 0.0
    """Wall time; 0: three times `cpu_s` and five seconds."""
    quiet_s: float = 0.0
    """So long it may say nothing on stdout; 0: as long as it likes."""
    memory: int = 1 << 30
    """Resident bytes of all its processes together. Where a control group can be made (`weaknesses`), all that they
    hold anyhow, files in /tmp too, is at most this and `scratch`."""
    address_space: int = 0
    """Bytes that a process may map; 0: four times `memory`."""
    processes: int = 32
    """Processes and threads."""
    scratch: int = 64 << 20
    """Bytes that may be written to the working folder, /tmp and /dev/shm, each."""
    files: int = 256
    """Open files of a process."""
    output: int = 1 << 20
    """Bytes of stdout and of stderr that are kept, the last ones; the rest is read and dropped."""


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended."""

    status: str
    """'done' (see `code`), 'timeout', 'memory' (killed for it), 'killed' (by a signal), 'unstarted' (it never ran)."""
    code: int
    """Exit code; negative for a signal."""
    stdout: bytes
    stderr: bytes
    seconds: float


@cache
def sandbox_kind() -> str:
    """'bubblewrap', 'namespaces', or 'none: why'; tried out once per process, after tidying up."""
    _sweep()
    said = []
    for kind in ("bubblewrap", "namespaces"):
        try:
            out = _run(kind, ["true"], SandboxLimits(wall_s=20.0), b"", {}, (), {})
        except OSError as e:
            said.append(f"{kind}: {e.strerror or e}")
            continue
        if out.status == "done" and out.code == 0:
            return kind
        last = (out.stderr.decode(errors="replace").strip().splitlines() or [out.status])[-1]
        said.append(f"{kind}: {last}")
    return "none: " + "; ".join(said)


def run(
    argv: Sequence[str],
    limits: SandboxLimits | None = None,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    readable: Iterable[Path | str] = (),
    env: Mapping[str, str] | None = None,
    patience: Callable[[bytes], float] | None = None,
) -> CommandEnd:
    """Runs `argv` in the sandbox and says how it ended.

    `files` (name to content) lie in its working folder, writable; `readable` are folders or files of this machine
    that it may read. Of the environment it sees only `env`. `patience` says, from the end of its
    stdout so far, how many seconds it may now be quiet; without it that is `limits.quiet_s`. Raises SandboxUnavailable.
    """
    kind = sandbox_kind()
    if kind.startswith("none"):
        raise SandboxUnavailable(
            f"generated code is not run, because no sandbox works here ({kind.removeprefix('none: ')})",
            hint="Install bubblewrap (apt-get install bubblewrap), or allow unprivileged user namespaces",
        )
    open_to_it = [str(p) for p in readable]
    if homes := [p for p in open_to_it if is_home(p)]:
        raise SandboxUnavailable(
            "generated code may not read a home folder, nor what lies above one", where=homes[0],
            hint="Put the data, the task and the evaluation's folder into folders of their own",
        )  # fmt: skip
    out = _run(
        kind, argv, limits or SandboxLimits(), stdin, dict(files or {}), open_to_it, dict(env or {}), patience
    )
    if out.status == UNSTARTED:
        last = (out.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise SandboxUnavailable(f"the sandbox did not start: {last}", hint="Run the same command again")
    return out


def weaknesses() -> list[str]:
    """What is missing here of the sandbox's walls, in words; empty where all stand. Said before generated code is run."""
    kind = sandbox_kind()
    if kind.startswith("none"):
        return [f"generated code is not run, because no sandbox works here ({kind.removeprefix('none: ')})"]
    said = []
    if isinstance(where := cgroup.parents(), str):
        said.append(
            f"the memory of generated code is counted by sampling, not by a control group ({where}): for a tenth of a "
            "second, and in files and sockets, it may take more than its limit"
        )
    if isinstance(why := seccomp_filter(), str):
        said.append(f"generated code may make any system call ({why})")
    return said


def _sweep() -> None:
    """Removes what sandboxes left whose starters were killed: their folders carry the starters' process ids."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not pid.isdigit():
            continue
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            continue  # somebody else's, and alive


def _run(
    kind: str,
    argv: Sequence[str],
    limits: SandboxLimits,
    stdin: bytes,
    files: Mapping[str, bytes],
    readable: Iterable[Path | str],
    env: Mapping[str, str],
    patience: Callable[[bytes], float] | None = None,
) -> CommandEnd:
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    try:
        for part in ("inputs", "root"):
            (folder / part).mkdir()
        for name, content in files.items():
            place = folder / "inputs" / name
            if not place.resolve().is_relative_to((folder / "inputs").resolve()):
                raise ValueError(f"'{name}' is outside the working folder")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        with _Handshake() as shake, _group(limits) as group:
            command = _command(kind, list(argv), limits, folder, readable, env, shake)
            if group is not None:
                joins = " && ".join(f'echo 0 > "${i}"' for i in range(1, len(group.joins) + 1))
                script = f'{joins} && shift {len(group.joins)} && exec "$@"'
                command = ["/bin/sh", "-c", script, "sh", *group.joins, *command]
            quiet = patience or (lambda said: limits.quiet_s)
            out = _supervise(command, limits, stdin, shake, quiet, sampled=group is None)
            if group is not None and group.ran_out() and out.status not in ("timeout", UNSTARTED):
                out = replace(out, status="memory")
            return out
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _group(limits: SandboxLimits) -> Iterator[cgroup.Group | None]:
    """A control group for one command; None where none can be made."""
    place = cgroup.parents()
    if isinstance(place, str):
        yield None
        return
    try:
        group = cgroup.make(place, memory=limits.memory + limits.scratch, processes=limits.processes)
    except (
        OSError
    ):  # it could be made when it was tried out: memory or the number of groups has run out meanwhile
        yield None
        return
    try:
        yield group
    finally:
        group.remove()


def _command(
    kind: str,
    argv: list[str],
    limits: SandboxLimits,
    folder: Path,
    readable: Iterable[Path | str],
    env: Mapping[str, str],
    shake: _Handshake,
) -> list[str]:
    system = [p for p in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64") if os.path.exists(p)]
    system += [p for p in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives",
                           "/etc/localtime", "/etc/mime.types") if os.path.exists(p)]  # fmt: skip
    paths = outermost([*python_paths(), *(str(Path(p).absolute()) for p in readable), str(_CONFINE)])
    bpf = seccomp_filter()
    root = os.geteuid() == 0
    plan: dict[str, Any] = {
        "limits": {**asdict(limits), "address_space": limits.address_space or 4 * limits.memory},
        # A user of its own for each command, so that the kernel counts its processes and nobody else's.
        "user": 61_000 + secrets.randbelow(4_000) if root else None,
        "inputs": "/inputs",
        "ready": shake.theirs[0],
        "go": shake.theirs[1],
        "home": HOME,
        "env": {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **env},
        "filter": bpf.hex() if isinstance(bpf, bytes) else "",
    }  # fmt: skip
    masked = [f"/proc/{name}" for name in _MASKED if os.path.exists(f"/proc/{name}")]
    python = [sys.executable, "-I", "-S", "-B", str(_CONFINE)]
    if kind == "namespaces":
        plan["mounts"], plan["masked"] = [*system, *paths], masked
        plan["folder"], plan["root"] = str(folder / "inputs"), str(folder / "root")
        return [*python, str(shake.give(json.dumps(plan).encode())), *argv]
    bwrap = ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    bwrap += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    # Root needs no user namespace, and then a real other user can be had, whose processes are counted apart.
    bwrap += (
        ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        if root
        else ["--unshare-user"]
    )
    bwrap += ["--perms", "0755", "--dir", "/etc"]  # else only root could look into it
    for p in system:
        bwrap += ["--ro-bind", p, p]
    bwrap += ["--proc", "/proc", "--dev", "/dev"]
    for p in masked:
        bwrap += ["--dev-bind", "/dev/null", p]
    for place in ("/tmp", "/dev/shm", HOME):
        bwrap += ["--perms", "1777", "--size", str(limits.scratch), "--tmpfs", place]
    for p in paths:
        for parent in reversed(Path(p).parents[:-1]):
            bwrap += ["--perms", "0755", "--dir", str(parent)]
        bwrap += ["--ro-bind-try", p, p]
    bwrap += ["--ro-bind", str(folder / "inputs"), "/inputs", "--chdir", HOME]
    # Both are folders in memory, of any size while they can be written to.
    bwrap += ["--remount-ro", "/dev", "--remount-ro", "/"]
    if isinstance(bpf, bytes):  # bubblewrap's own first process, too, is held by it
        bwrap += ["--seccomp", str(shake.give(bpf))]
    options = shake.give(b"".join(os.fsencode(word) + b"\0" for word in bwrap))
    told = shake.give(json.dumps(plan).encode())
    return [shutil.which("bwrap") or "bwrap", "--args", str(options), "--", *python, str(told), *argv]


class _Handshake:
    """Two pipes: the sandbox says that it will die with us, and only then is told to go.

    Without it a kill in the milliseconds before it has arranged that would leave it running for ever. What it is told
    goes through pipes too: a command line can be read by what it starts.
    """

    def __init__(self) -> None:
        self.theirs: tuple[int, ...] = ()
        self._given: list[tuple[int, bytes]] = []

    def give(self, data: bytes) -> int:
        """The sandbox's end of a pipe in which it finds this."""
        theirs, ours = os.pipe()
        self.theirs = (*self.theirs, theirs)
        self._given.append((ours, data))
        return theirs

    def hand_over(self) -> None:
        """Writes what was given, in a thread, since a pipe holds little."""
        given, self._given = self._given, []
        for fd, data in given:
            threading.Thread(target=_feed, args=(os.fdopen(fd, "wb"), data), daemon=True).start()

    def __enter__(self) -> _Handshake:
        self._ready, ready = os.pipe()
        go, self._go = os.pipe()
        self.theirs = (ready, go)
        return self

    def __exit__(self, *error: object) -> None:
        for fd in (self._ready, self._go, *(ours for ours, _ in self._given)):
            os.close(fd)
        self.started()

    def started(self) -> None:
        """The sandbox has its ends now; ours are closed."""
        for fd in self.theirs:
            os.close(fd)
        self.theirs = ()

    def go(self, within: float) -> bool:
        """Waits until it is ready and lets it go; False if it ended before, or never was."""
        if select.select([self._ready], [], [], within)[0] and os.read(self._ready, 1):
            try:
                os.write(self._go, b"g")
            except BrokenPipeError:
                return False
            return True
        return False


def _supervise(
    command: list[str],
    limits: SandboxLimits,
    stdin: bytes,
    shake: _Handshake,
    patience: Callable[[bytes], float],
    sampled: bool,
) -> CommandEnd:
    """Runs the sandboxed command, reads what it says, and kills it when it takes too much.

    `sampled`: no control group counts what it holds, so shared memory that it maps counts as used.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=shake.theirs,
        env=_ENVIRONMENT,
        cwd="/",
    )
    shake.started()
    shake.hand_over()
    assert process.stdin and process.stdout and process.stderr
    wall = limits.wall_s or 3 * limits.cpu_s + 5
    began = shake.go(30.0)
    started = time.monotonic()
    kept = [_Kept(started), _Kept(started)]
    threads = [
        threading.Thread(target=_drain, args=(stream, kept[i], limits.output), daemon=True)
        for i, stream in enumerate((process.stdout, process.stderr))
    ]
    threads.append(threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True))
    for t in threads:
        t.start()
    status = "" if began else UNSTARTED
    wait = 0.01
    try:
        while not status:
            try:
                process.wait(wait)
                break
            except subprocess.TimeoutExpired:
                wait = min(wait * 1.5, 0.1)
            now = time.monotonic()
            quiet = patience(bytes(kept[0].data[-100:]))
            if now - started > wall or (quiet and now - kept[0].last > quiet):
                status = "timeout"
            elif _resident(process.pid, shared=sampled) > limits.memory:
                status = "memory"
    finally:
        # The first process of its id space dies with bubblewrap (or with confine.py), and all others with it.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it had ended
        process.wait()
    for t in threads[:2]:
        t.join(5)
    process.stdout.close()
    process.stderr.close()
    code = process.returncode
    if not status and code > 128 and code - 128 in (signal.SIGKILL, signal.SIGXCPU):
        # bubblewrap passes a signal on as 128 + n; the kernel ended it: processor time, or memory.
        status, code = ("timeout" if code - 128 == signal.SIGXCPU else "killed"), 128 - code
    elif not status:
        status = "killed" if code < 0 else "done"
    return CommandEnd(status, code, bytes(kept[0].data), bytes(kept[1].data), time.monotonic() - started)


@dataclass
class _Kept:
    last: float
    """When it said something."""
    data: bytearray = field(default_factory=bytearray)


def _drain(stream: IO[bytes], into: _Kept, limit: int) -> None:
    """Keeps the last `limit` bytes."""
    while piece := stream.read1(1 << 16):  # type: ignore[attr-defined]
        into.data += piece
        into.last = time.monotonic()
        if len(into.data) > 2 * limit:
            del into.data[:-limit]
    if len(into.data) > limit:
        del into.data[:-limit]


def _feed(stream: IO[bytes], data: bytes) -> None:
    try:
        stream.write(data)
        stream.close()
    except BrokenPipeError:
        pass  # it did not read to the end


def _resident(pid: int, shared: bool = False) -> int:
    """Resident bytes of the whole sandbox, from /proc; 0 once it is gone.

    `shared`: and all shared memory without a file that is mapped. Its pages stay when a process gives its own view of
    them back, and then belong to nobody.
    """
    import psutil

    total = 0
    segments: dict[str, int] = {}
    try:
        for p in psutil.Process(pid).children(recursive=True):
            try:
                total += p.memory_info().rss
                if shared:
                    _add_segments(p.pid, segments)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
    except psutil.NoSuchProcess:
        return 0
    return max(total, sum(segments.values()))


def _add_segments(pid: int, into: dict[str, int]) -> None:
    """Inode -> bytes mapped, of the process's shared memory without a file."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return  # gone, or not ours
    for line in lines:
        if line.endswith("/dev/zero (deleted)"):
            span, _, _, _, inode, *_ = line.split()
            low, high = span.split("-")
            into[inode] = max(into.get(inode, 0), int(high, 16) - int(low, 16))
