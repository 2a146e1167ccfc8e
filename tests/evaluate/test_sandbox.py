"""What nobody trusts cannot reach the network, our files, our memory or our processes."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from unbroken.evaluate.processes import bytecode
from unbroken.evaluate.processes.bytecode import readable_bytecode
from unbroken.evaluate.scoring import sandbox
from unbroken.evaluate.scoring.sandbox import CommandEnd, SandboxLimits

PYTHON = [sys.executable, "-I", "-S", "-c"]


def works(kind: str) -> bool:
    try:
        out = sandbox._run(kind, ["true"], SandboxLimits(wall_s=20.0), b"", {}, (), {})
    except OSError:
        return False
    return (out.status, out.code) == ("done", 0)


@pytest.fixture(scope="module", params=["bubblewrap", "namespaces"])
def kind(request: pytest.FixtureRequest) -> str:
    if not works(request.param):
        pytest.skip(f"this machine lets nobody make a sandbox with {request.param}")
    return str(request.param)


def run(kind: str, code: str, **more: Any) -> CommandEnd:
    files = more.pop("files", {})
    readable = more.pop("readable", ())
    stdin = more.pop("stdin", b"")
    return sandbox._run(kind, [*PYTHON, code], SandboxLimits(**more), stdin, files, readable, {"SEEN": "yes"})


def test_it_runs_and_answers(kind: str) -> None:
    code = "import sys,os; print(sys.stdin.read(), open('in/a.txt').read(), os.getcwd(), dict(os.environ)['SEEN'])"
    out = run(kind, code, stdin=b"hello", files={"in/a.txt": b"file"})
    assert (out.status, out.code, out.stdout) == ("done", 0, b"hello file /sandbox yes\n")
    assert run(kind, "import sys; sys.exit(7)").code == 7


def test_there_is_no_network(kind: str) -> None:
    code = "import socket; socket.create_connection(('127.0.0.1', 22), 2)"
    out = run(kind, code)
    assert out.code == 1
    code = "import socket; print([n for _, n in socket.if_nameindex() if n != 'lo'])"
    assert run(kind, code).stdout in (b"[]\n", b"['sit0']\n", b"['tunl0', 'sit0']\n")


def test_our_files_are_neither_seen_nor_written(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("token")
    assert b"FileNotFoundError" in run(kind, f"open({str(secret)!r}).read()").stderr
    assert run(kind, f"print(open({str(secret)!r}).read())", readable=[secret]).stdout == b"token\n"
    out = run(kind, f"open({str(secret)!r}, 'w').write('x')", readable=[secret])
    assert out.code == 1
    assert secret.read_text() == "token"
    for place in ("/etc/passwd2", "/usr/x", "/x", f"{sys.prefix}/x", "/inputs/x"):
        assert run(kind, f"open({place!r}, 'w')").code == 1, place
    out = run(kind, "open('a.txt','w').write('changed'); open('/tmp/b','w').write('b'); print(open('a.txt').read())",
              files={"a.txt": b"was"})  # fmt: skip
    assert out.stdout == b"changed\n"
    assert not Path("/tmp/b").exists()


def test_the_environment_is_empty(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hidden")
    assert b"hidden" not in run(kind, "import os; print(dict(os.environ))").stdout


def test_memory_is_limited_for_one_process_and_for_all(kind: str) -> None:
    assert b"MemoryError" in run(kind, "x = bytearray(3 << 30)", memory=256 << 20).stderr
    children = (
        "import os,time\nfor i in range(6):\n  if os.fork() == 0:\n    x = bytearray(60 << 20); time.sleep(30)\n"
        "time.sleep(30)"
    )
    out = run(kind, children, memory=128 << 20, wall_s=20.0)
    assert out.status == "memory"
    assert out.seconds < 15


def test_files_are_limited(kind: str) -> None:
    code = "\nfor i in range(40):\n  open(str(i), 'wb').write(bytes(1 << 20))"
    out = run(kind, code, scratch=8 << 20)
    assert b"No space left" in out.stderr


def test_processes_are_limited_and_none_survives(kind: str) -> None:
    bomb = "import os,time\nfor i in range(300):\n  if os.fork() == 0: time.sleep(60)\nprint('all')"
    out = run(kind, bomb, processes=16)
    assert b"BlockingIOError" in out.stderr
    marker = f"sleeper-{os.getpid()}"
    out = run(
        kind, f"import os,time\nif os.fork() == 0:\n  os.setsid(); time.sleep(600) #{marker}\nprint('left')"
    )
    assert out.stdout == b"left\n"
    deadline = time.monotonic() + 5
    while any(marker in _cmdline(p) for p in os.listdir("/proc") if p.isdigit()):
        assert time.monotonic() < deadline, "a process outlived its sandbox"
        time.sleep(0.05)


def test_it_ends_when_whoever_started_it_is_killed(kind: str) -> None:
    marker = f"orphan-{os.getpid()}-{kind}"
    program = (
        "import sys\nfrom unbroken.evaluate.scoring import sandbox\n"
        f"sandbox._run({kind!r}, [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600) #{marker}'], "
        "sandbox.SandboxLimits(cpu_s=600), b'', {}, (), {})"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )

    def inside() -> bool:
        own = (_cmdline(p) for p in os.listdir("/proc") if p.isdigit() and p != str(starter.pid))
        return any(marker in c for c in own)

    deadline = time.monotonic() + 30
    while not inside():
        assert time.monotonic() < deadline, "it did not start"
        time.sleep(0.05)
    starter.kill()
    starter.wait()
    deadline = time.monotonic() + 10
    while inside():
        assert time.monotonic() < deadline, "the sandbox outlived whoever started it"
        time.sleep(0.05)


def _cmdline(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_time_is_limited_by_the_processor_and_by_the_clock(kind: str) -> None:
    assert run(kind, "while 1: pass", cpu_s=1, wall_s=60).status == "timeout"
    assert run(kind, "import time; time.sleep(60)", wall_s=0.5).status == "timeout"
    quiet = run(kind, "import time; print(1, flush=True); time.sleep(60)", quiet_s=0.5, wall_s=60)
    assert quiet.status == "timeout"
    assert quiet.seconds < 20


def test_output_is_limited_to_its_end(kind: str) -> None:
    out = run(kind, "print('x' * (3 << 20)); print('end')", output=1000)
    assert len(out.stdout) == 1000
    assert out.stdout.endswith(b"x\nend\n")


def test_its_death_is_told_apart(kind: str) -> None:
    out = run(kind, "import os; os.kill(os.getpid(), 9)")
    assert (out.status, out.code) == ("killed", -9)


def test_what_killed_starters_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f"unbroken-sandbox-{gone.pid}-a", f"unbroken-sandbox-{os.getpid()}-b", "unbroken-sandbox-x"):
        (tmp_path / name / "inputs").mkdir(parents=True)
    sandbox._sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"unbroken-sandbox-{os.getpid()}-b",
        "unbroken-sandbox-x",
    ]


def test_inputs_stay_inside_the_working_folder() -> None:
    with pytest.raises(ValueError, match="outside"):
        sandbox.run(["true"], files={"../../x": b""})


def test_without_a_sandbox_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "sandbox_kind", lambda: "none: bubblewrap: not found")
    with pytest.raises(sandbox.SandboxUnavailable, match="bubblewrap: not found") as e:
        sandbox.run(["true"])
    assert "apt-get install bubblewrap" in str(e.value)


def test_kept_bytecode_of_what_it_may_read_is_found_and_that_of_the_rest_not_shown(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    monkeypatch.setattr(sys, "pycache_prefix", str(kept))
    for name in ("shown", "private"):
        source = tmp_path / name / "known.py"
        source.parent.mkdir()
        source.write_text("FROM = 'bytecode'\n")
        py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        source.write_text("FROM = 'source'\n")
    shown = str(tmp_path / "shown")
    env, folders = readable_bytecode([shown, str(tmp_path / "nowhere")])
    assert env == {"PYTHONPYCACHEPREFIX": str(kept)} and folders[0] == f"{kept}{shown}"
    code = f"""
import glob, os, sys
sys.path.insert(0, {shown!r})
import known
print(known.FROM, [os.path.relpath(p, {str(kept)!r}) for p in glob.glob({str(kept)!r} + '/**/*.pyc', recursive=True)])
try:
    os.remove(known.__cached__)
except OSError as e:
    print(type(e).__name__)
"""
    out = sandbox._run(
        kind, [sys.executable, "-S", "-c", code], SandboxLimits(), b"", {}, [shown, *folders], env
    )
    tag = sys.implementation.cache_tag
    assert out.stdout.decode().splitlines()[0] == f"bytecode ['{shown[1:]}/known.{tag}.pyc']", out.stderr
    assert b"Error" in out.stdout, "it may read, and not write"
    assert (kept / shown[1:] / f"known.{tag}.pyc").exists()


def test_where_no_bytecode_is_kept_nothing_more_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(bytecode, "keep_bytecode", dict)
    assert readable_bytecode(["/usr/lib/python3"]) == ({}, [])
