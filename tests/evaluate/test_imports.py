"""A fork server imports once; workers that it forks are workers like any other."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from unbroken.evaluate.contracts import Report
from unbroken.evaluate.engines import Slot
from unbroken.evaluate.engines.local import LocalEngine, imports_for, imports_for_harnesses
from unbroken.evaluate.preparation.prepare import child_env
from unbroken.evaluate.processes import bytecode
from unbroken.evaluate.processes.imports import Forked, Imports
from unbroken.evaluate.run.job import Launchers
from unbroken.evaluate.scoring.pool import open_pool
from unbroken.journal.codec import encode
from unbroken.testing.evaluation import BACKEND, ThreadScoring

from .evaluating import coordinator, evaluate, fake_suite, fake_task, numbers

SUITE = fake_suite(fake_task("a", samples=40), fake_task("b", samples=9))


@pytest.fixture
def imports(tmp_path: Path) -> Iterator[Imports]:
    made = imports_for(BACKEND, [Slot("w0"), Slot("w1")], tmp_path / "imports", 1)
    yield made
    made.close()


def with_imports(tmp_path: Path, out: str, imports: Imports) -> tuple[dict[str, object], list[int]]:
    engine = LocalEngine(tmp_path / out / "logs", threads=1, imports=imports)
    c = coordinator(tmp_path, SUITE, out=out, launchers=Launchers(engine, ThreadScoring))
    report = c.run()
    assert not report.errors
    from unbroken.evaluate.result.journal import events

    return dict(numbers(report)), [e["pid"] for e in events(c.job.folder.journal) if e["event"] == "join"]


def with_harnesses(tmp_path: Path, out: str, imports: Imports) -> Report:
    engine = LocalEngine(tmp_path / out / "logs", threads=1)
    launchers = Launchers(engine, partial(open_pool, imports=imports), imports)
    return coordinator(tmp_path, SUITE, out=out, launchers=launchers).run()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_one_import_serves_the_workers_of_several_evaluations(tmp_path: Path, imports: Imports) -> None:
    alone = numbers(evaluate(tmp_path, SUITE, workers=1, out="alone"))
    pids: set[int] = set()
    for out in ("first", "second"):
        found, joined = with_imports(tmp_path, out, imports)
        assert found == alone and len(joined) == 2
        pids |= set(joined)
    assert len(pids) == 4, "each evaluation has fresh processes"
    said = (tmp_path / "imports" / "imports.log").read_text()
    assert said.count("imports for every worker took") == 1
    assert said.count("warm ") == 1


def test_a_worker_that_dies_is_told_with_its_code_and_replaced(
    tmp_path: Path, imports: Imports, eventually: Callable[..., None]
) -> None:
    code = tmp_path / "ends.py"
    code.write_text("import time\ndef main(argv):\n    time.sleep(float(argv[0]))\n    return 7\n")
    env = child_env(PYTHONPATH=str(tmp_path))
    made = imports_for(BACKEND, [Slot("w0")], tmp_path / "logs", 1)
    sys_path = {**env, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    made = Imports(BACKEND, sys_path, tmp_path / "logs" / "imports.log")
    try:
        ends = made.fork(["ends", "0"], sys_path, tmp_path / "a.log", with_input=False)
        stays = made.fork(["ends", "1000"], sys_path, tmp_path / "b.log", with_input=True)
        fails = made.fork(["nosuch"], sys_path, tmp_path / "c.log", with_input=False)
        assert ends.wait(30) == 7 and fails.wait(30) == 1
        assert "No module named 'nosuch'" in (tmp_path / "c.log").read_text()
        eventually(lambda: stays.poll() is None and stays.pid > 0, within=20)
        stays.kill()
        assert stays.wait(20) == -signal.SIGKILL
        last = made.fork(["ends", "1000"], sys_path, tmp_path / "b.log", with_input=False)
        eventually(lambda: last.poll() is None and last.pid > 0, within=20)
        made.close()
        assert last.poll() is None, "what was forked outlives the server"
        last.kill()
        eventually(lambda: last.poll() is not None, within=20)
        assert not made.usable
    finally:
        made.close()


def test_an_import_that_hangs_ends_with_the_engine(tmp_path: Path, eventually: Callable[..., None]) -> None:
    root = Path(__file__).resolve().parents[2]
    env = child_env(PYTHONPATH=os.pathsep.join([str(root), str(root / "src")]))
    made = Imports("tests.evaluate.misbehaving:Hangs", env, tmp_path / "imports.log")
    child = made.fork(["unbroken.evaluate.engines.worker.process"], env, tmp_path / "w.log", with_input=False)
    eventually(lambda: "warm" in (tmp_path / "imports.log").read_text(), within=40)
    assert child.poll() is None and child.pid == 0
    child.kill()
    assert child.wait(20) != 0 and not made.usable


def test_bytecode_is_kept_where_the_installation_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    monkeypatch.setattr(bytecode, "_package", lambda name: package if name == "lm_eval" else None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    started: list[object] = []
    monkeypatch.setattr(bytecode.subprocess, "Popen", lambda *a, **k: started.append(a))
    monkeypatch.setattr(bytecode.sys, "dont_write_bytecode", True)
    bytecode.keep_bytecode.cache_clear()
    env = bytecode.keep_bytecode()
    assert env == {
        "PYTHONPYCACHEPREFIX": str(tmp_path / "cache/unbroken/bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    bytecode.keep_bytecode.cache_clear()
    assert bytecode.keep_bytecode() == env and len(started) == 1, "compiled ahead once"
    py_compile.compile(str(package / "__init__.py"))
    bytecode.keep_bytecode.cache_clear()
    assert bytecode.keep_bytecode() == {}, "it has its own"
    bytecode.keep_bytecode.cache_clear()


def test_what_is_compiled_ahead_is_found_by_the_import(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("x = 1\n")
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path / "kept"), "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}  # fmt: skip
    ahead = f"from unbroken.evaluate.processes.bytecode import compile_files as c; print(c([{str(tmp_path / 'some.py')!r}]))"
    for expected in ("1", "0"):
        assert (
            subprocess.run(
                [sys.executable, "-c", ahead], env=env, capture_output=True, text=True, check=True
            ).stdout.strip()
            == expected
        )
    said = subprocess.run(
        [sys.executable, "-v", "-c", "import some"], env=env, capture_output=True, text=True, check=True
    ).stderr
    assert f"{tmp_path / 'some'}" in said and "matches" in said


def test_bytecode_beside_the_source_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("x = 1\n")
    beside = Path(py_compile.compile(str(tmp_path / "some.py"), doraise=True) or "")
    assert bytecode._take(str(tmp_path / "some.py"), str(tmp_path / "kept" / "some.pyc"))
    assert (tmp_path / "kept" / "some.pyc").read_bytes() == beside.read_bytes()
    beside.unlink()
    assert not bytecode._take(str(tmp_path / "some.py"), str(tmp_path / "kept" / "other.pyc"))


def test_what_is_compiled_ahead_comes_in_the_order_of_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An importer that reaches a file before its turn compiles for itself."""
    for name in ("__init__.py", "a.py", "later/__init__.py", "now/__init__.py", "now/inner/z.py", "old.py"):
        (tmp_path / "sympy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sympy" / name).touch()
    order = tmp_path / "order.txt"
    order.write_text("# words\nkeyword sympy sympy.now nosuch.inner\nsympy.old sympy.gone\n")
    monkeypatch.setattr(bytecode, "ORDER", order)
    for name in [m for m in sys.modules if m.partition(".")[0] == "sympy"]:
        monkeypatch.delitem(sys.modules, name)  # an earlier test may have imported the real one
    monkeypatch.syspath_prepend(str(tmp_path))
    bytecode._origin.cache_clear()
    found = list(bytecode.files())
    bytecode._origin.cache_clear()
    ours = [str(f.relative_to(tmp_path / "sympy")) for f in found if f.is_relative_to(tmp_path)]
    assert found[0].name == "keyword.py"
    assert ours == ["__init__.py", "a.py", "old.py", "now/__init__.py", "later/__init__.py", "now/inner/z.py"]


def test_what_no_language_model_needs_is_not_imported() -> None:
    from unbroken.evaluate.harness import transformers as backend

    name = "scipy"
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == name}
    for n in before:
        del sys.modules[n]
    try:
        with backend.quick_imports():
            assert importlib.util.find_spec(name) is None
        assert name not in sys.modules, "others import it as before"
    finally:
        sys.modules.update(before)


@pytest.mark.slow
def test_those_that_prepare_and_score_are_forked_too(tmp_path: Path) -> None:

    from unbroken.testing.evaluation import HARNESS

    alone = numbers(evaluate(tmp_path, SUITE, workers=1, out="alone"))
    assert all(t.harness == HARNESS for t in SUITE.tasks)
    made = imports_for_harnesses([HARNESS], tmp_path / "imports")
    parents: set[int] = set()
    fork = made.fork_piped

    def forked(*args: Any) -> Forked:
        child = fork(*args)
        while not child.pid and child.poll() is None:
            made.hear(0.02)
        parents.add(parent(child.pid))
        return child

    made.fork_piped = forked  # type: ignore[method-assign]
    try:
        for out in ("first", "second"):
            assert numbers(with_harnesses(tmp_path, out, made)) == alone
        assert made._process is not None and parents == {made._process.pid}
        # Without the server it goes on as without one.
        made.close()
        assert numbers(with_harnesses(tmp_path, "third", made)) == alone
    finally:
        made.close()
    assert (tmp_path / "imports" / "imports-cpu.log").read_text().count(
        "imports for preparing and scoring"
    ) == 1


def test_a_fork_server_that_dies_in_its_imports_is_done_without(tmp_path: Path) -> None:
    from unbroken.evaluate.contracts import Suite
    from unbroken.evaluate.preparation.prepare import Preparers

    (tmp_path / "fatal.py").write_text("import os\nos._exit(3)\n")
    env = child_env(PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    made = Imports("", env, tmp_path / "log", ["fatal:Harness"])
    preparers = Preparers(1, tmp_path / "prepare.log", made)
    try:
        job = {"op": "list", "suite": encode(Suite("s", (), folder=str(tmp_path))), "harness": "plain"}
        assert preparers._ask(job) == []
    finally:
        preparers.close()
        made.close()


def test_two_forks_do_not_share_their_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(
        "import numpy, random\ndef main(argv):\n    print(numpy.random.random(), random.random())\n    return 0\n"
    )
    env = child_env(PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    made = Imports("", env, tmp_path / "log", ["numpy:ndarray"])
    try:
        for name in ("a", "b"):
            made.fork(["draws"], env, tmp_path / name, with_input=False).wait(60)
        first, second = ((tmp_path / n).read_text().split() for n in ("a", "b"))
        assert first[0] != second[0] and first[1] != second[1]
    finally:
        made.close()


def test_a_process_that_has_ended_and_that_nobody_took_away_does_not_run() -> None:
    from unbroken.evaluate.processes.imports import _alive

    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    try:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert not _alive(ended.pid) and _alive(os.getpid())
    finally:
        ended.wait()
    assert not _alive(ended.pid)


def test_one_that_does_not_lead_its_session_yet_is_killed(tmp_path: Path) -> None:
    server = Imports("", {}, tmp_path / "log")
    server.gone = True
    just_forked = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
    )  # in our session
    child = Forked(server, 1, None)
    child.pid = just_forked.pid
    child.kill()
    assert just_forked.wait(20) == -signal.SIGKILL
    assert child.poll() is not None
