"""Code is a suspect like a node: what is new since the run last trained is told."""

from __future__ import annotations

from pathlib import Path

from unbroken.progress import RunDir
from unbroken.recover.supervise.attempt.code import Code, describe_new, digest_code, find_new, keep_code


def test_what_is_new_since_the_last_attempt_that_trained_is_told(tmp_path: Path) -> None:
    here, run = tmp_path / "job", RunDir(tmp_path / "job" / "runs" / "a")
    run.create()
    (here / "train.py").write_text("1")
    (here / "lib").mkdir()
    (here / "lib" / "data.py").write_text("1")
    keep_code(run, 1, ["train.py"], here)
    assert not describe_new(run, 1), "nothing was before"
    run.steps(1).write_text("{}\n")
    keep_code(run, 2, ["train.py"], here)
    assert not describe_new(run, 2)
    (here / "lib" / "data.py").write_text("2")
    (here / "lib" / "new.py").write_text("2")
    keep_code(run, 3, ["train.py", "--lr", "1"], here)
    # The second did not train: it says nothing of what works.
    told = describe_new(run, 3)
    assert told.startswith("new since attempt 1, the last that trained: ")
    assert {"the command changed", "lib/data.py changed", "lib/new.py is new"} <= {
        *told.partition(": ")[2].split(", ")
    }
    run.code(3).write_text("torn")
    assert not describe_new(run, 3)


def test_an_attempt_that_trained_with_what_is_new_says_so(tmp_path: Path) -> None:
    here, run = tmp_path / "job", RunDir(tmp_path / "job" / "runs" / "a")
    run.create()
    for attempt in (1, 2):
        keep_code(run, attempt, ["train.py", "--lr", str(attempt)], here)
        run.steps(attempt).write_text("{}\n" * 50)
    assert describe_new(run, 2) == "new since attempt 1, attempt 2 made 50 steps with it: the command changed"
    assert not describe_new(run, 2, from_outside=True), "a kill has nothing to do with code that trains"
    run.steps(2).write_text("")
    told = "new since attempt 1, the last that trained: the command changed"
    assert describe_new(run, 2) == describe_new(run, 2, from_outside=True) == told, "more memory, say"


def test_only_what_ranks_may_read_is_looked_at(tmp_path: Path) -> None:
    for name in (
        ".git/x.py",
        "env/pyvenv.cfg",
        "env/y.py",
        "__pycache__/z.py",
        "old/run.toml",
        "old/a.json",
        "big.json",
        "a.py",
        "w.bin",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "big.json").write_bytes(bytes(2 << 20))
    code = digest_code(["a.py"], tmp_path, tmp_path / "run")
    assert set(code.files) == {"the command", "a.py"} and code.whole


def test_what_was_not_looked_at_is_neither_new_nor_gone() -> None:
    then, now = Code({"a": "1", "b": "1"}), Code({"a": "2", "c": "1"}, whole=False)
    assert find_new(then, now) == ["a changed"]
    assert find_new(then, Code({"a": "2", "c": "1"})) == ["a changed", "c is new", "b is gone"]
    assert not find_new(then, Code())
