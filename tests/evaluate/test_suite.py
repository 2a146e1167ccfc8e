from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.errors import InputError, UnknownKey
from unbroken.evaluate.contracts import ModelSpec, PreparedTask, Suite, Task
from unbroken.evaluate.model.sources import make_manifest
from unbroken.evaluate.suite.reader import parse_suite, read_suite, shipped_suites
from unbroken.journal.codec import decode, encode

GOOD = """
[suite]
name = "s"
[defaults]
harness = "plain"
shots = 2
[[task]]
name = "a"
[task.prior]
samples = 10
seconds = 5
[[task]]
name = "b"
shots = 0
options = {data = "x.jsonl"}
"""


def test_defaults_priors_and_options() -> None:
    s = parse_suite(GOOD)
    assert [(t.name, t.harness, t.shots) for t in s.tasks] == [("a", "plain", 2), ("b", "plain", 0)]
    assert s.priors["a"].seconds == 5.0
    assert s.tasks[1].options == {"data": "x.jsonl"}


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("[suite", InputError, "not valid TOML"),
        ("[suite]\nname='x'", InputError, "no \\[\\[task\\]\\]"),
        ("[[task]]\nname='a'\n[[task]]\nname='a'", InputError, "two tasks"),
        ("[[task]]\nname='a'\nshot=1", UnknownKey, "Did you mean 'shots'"),
        ("[[task]]\nname='a'\nshots='1'", InputError, "expected a whole number"),
        ("[[task]]\nname='../a'", InputError, "cannot name files"),
        ("[[task]]\nshots=1", InputError, "'name' is missing"),
        ("[[task]]\nname='a'\nmetric='mach'", UnknownKey, "match"),
        ("[[task]]\nname='a'\nlimit=0", InputError, "at least 1"),
        ("[[task]]\nname='a'\n[task.prior]\nspread=0.5", InputError, "spread below 1"),
        ("[tasks]", UnknownKey, "Did you mean 'task'"),
        ("[suite]\nnme='x'\n[[task]]\nname='a'", UnknownKey, "name"),
    ],
)
def test_what_is_wrong_is_named(text: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        parse_suite(text, where="s.toml")


def test_a_suite_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="core63"):
        read_suite(tmp_path / "s.toml")
    with pytest.raises(UnknownKey, match="core63"):
        read_suite("core36")


def test_the_shipped_suite_is_what_its_script_writes() -> None:
    assert shipped_suites() == ["core63"]
    s = read_suite("core63")
    assert len(s.tasks) == 63 == len(s.priors)
    root = Path(__file__).resolve().parents[2]
    code = "import evaluation_suite as e; raise SystemExit(e.text() != e.OUT.read_text())"
    assert subprocess.run([sys.executable, "-c", code], cwd=root / "benchmarks", check=False).returncode == 0
    assert all(t.licence for t in s.tasks)


def test_codec_round_trip() -> None:
    task = Task("a", options={"x": [1, {"y": None}]})
    manifest = make_manifest([("a.safetensors", 3, ("x", "y")), ("b", 0, ())])
    assert decode(type(manifest), encode(manifest)) == manifest
    for value in (
        task,
        Suite("s", (task,)),
        ModelSpec("m", options={"k": 1}),
        PreparedTask(task, "v", 3, 2, "f", "h", (1.0, 2.0)),
    ):
        assert decode(type(value), encode(value)) == value


def test_light_imports() -> None:
    """The planner and the coordinator run where no torch is."""
    modules = "unbroken.evaluate.run.coordinator, unbroken.evaluate.engines.worker.process, unbroken.evaluate.run.forecast, unbroken.cli.eval"
    code = f"import {modules}, sys; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'lm_eval', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_defaults_of_one_harness_are_not_given_to_another() -> None:
    suite = parse_suite(
        """
[defaults]
harness = "lm_eval"
shots = 5
limit = 10
options.include = "tasks"
[[task]]
name = "a"
[[task]]
name = "b"
options.gen_kwargs = { max_gen_toks = 64 }
[[task]]
name = "own"
harness = "plain"
[[task]]
name = "mine"
harness = "plain"
options.data = "x.jsonl"
"""
    )
    a, b, own, mine = suite.tasks
    assert a.options == {"include": "tasks"} and a.shots == 5
    assert b.options == {"include": "tasks", "gen_kwargs": {"max_gen_toks": 64}}
    assert own.options == {} and own.shots is None and own.limit == 10
    assert mine.options == {"data": "x.jsonl"}
