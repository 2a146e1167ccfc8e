"""Two small files make a task; their mistakes are said with file and line, before a GPU is taken."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.errors import (
    DatasetMissing,
    EvaluationError,
    InputError,
    ModelDoesNotLoad,
    UnknownKey,
    UnknownTask,
)
from unbroken.evaluate.contracts import Answer, ModelSpec, PreparedTask, Score, Suite, Task
from unbroken.evaluate.harness.plain import PlainBackend, PlainHarness
from unbroken.evaluate.suite import staged
from unbroken.testing.fake_models import FakeBackend, respond

SPEC = ModelSpec("fake", backend="unbroken.testing.fake_models:FakeBackend", block=4)
SUMS = "def prompt(row):\n    return f\"{row['a']} + {row['b']} =\"\n"
RIGHT = "def score(row, output):\n    return int(output) == row['a'] + row['b']\n"


def write_task(folder: Path, infer: str = SUMS, score: str = RIGHT, rows: int = 10) -> Suite:
    task = folder / "sums"
    task.mkdir(parents=True, exist_ok=True)
    (task / "infer.py").write_text(infer)
    (task / "score.py").write_text(score)
    if rows:
        (task / "data.jsonl").write_text(
            "".join(json.dumps({"a": i, "b": 2 * i}) + "\n" for i in range(rows))
        )
    return Suite("s", (Task("sums", harness="plain"),), folder=str(folder))


def run(suite: Suite, folder: Path, spec: ModelSpec = SPEC) -> tuple[PreparedTask, list[Answer], Score]:
    harness = PlainHarness()
    prepared = harness.prepare(suite.tasks[0], suite, spec, None, folder)
    model = FakeBackend().load(spec, None, ())
    answers = [
        a
        for b in range(prepared.blocks)
        for a in harness.run(model, prepared, harness.build_requests(prepared, b))
    ]
    return prepared, answers, harness.score(prepared, answers)


def test_a_prompt_and_a_score_make_a_task(tmp_path: Path) -> None:
    prepared, answers, score = run(write_task(tmp_path), tmp_path / "p")
    assert prepared.samples == 10
    assert prepared.blocks == 3
    assert prepared.output_tokens == 256
    values = [float(int(str(a.outputs[0])) == 3 * i) for i, a in enumerate(answers)]
    assert list(score.per_sample) == values
    assert 0 < sum(values) < 10
    assert score.metrics[0].value == statistics.fmean(values)
    assert score.metrics[0].stderr == pytest.approx(statistics.stdev(values) / 10**0.5, rel=1e-12)


def test_infer_may_make_the_calls_itself(tmp_path: Path) -> None:
    infer = (
        "def infer(model, rows):\n"
        "    first = model.generate([f\"{r['a']} + {r['b']} =\" for r in rows], max_tokens=8)\n"
        "    sure = model.loglikelihood([(f\"{r['a']} + {r['b']} =\", t) for r, t in zip(rows, first)])\n"
        "    return [[t, s[0]] for t, s in zip(first, sure)]\n"
    )
    score = (
        "def score(row, output):\n    return {'right': int(output[0]) == 3 * row['a'], 'sure': output[1]}\n"
    )
    prepared, answers, got = run(write_task(tmp_path, infer, score), tmp_path / "p")
    assert [m.name for m in got.metrics] == ["right", "sure"]
    assert len(answers[0].outputs[0]) == 2
    assert staged.read_block(prepared, 0)[0].requests[0].kind == "plain"


def test_choices_become_log_probabilities(tmp_path: Path) -> None:
    infer = (
        "def prompt(row):\n    return {'context': f\"{row['a']}?\", 'choices': ['yes', 'no', 'perhaps']}\n"
    )
    score = "def score(row, output):\n    return max(range(3), key=lambda i: output[i][0]) == 0\n"
    prepared, answers, got = run(write_task(tmp_path, infer, score), tmp_path / "p")
    sample = staged.read_block(prepared, 0)[0]
    assert [r.arguments for r in sample.requests] == [("0?", "yes"), ("0?", "no"), ("0?", "perhaps")]
    assert list(answers[0].outputs) == [respond(r) for r in sample.requests]
    assert got.scored == 10


def test_an_aggregate_of_its_own(tmp_path: Path) -> None:
    score = (
        RIGHT
        + "def aggregate(values):\n    return {'best': (max(values['score']), 0.25), 'n': len(values['score'])}\n"
    )
    _, _, got = run(write_task(tmp_path, score=score), tmp_path / "p")
    assert [(m.name, m.value, m.stderr) for m in got.metrics] == [("best", 1.0, 0.25), ("n", 10.0, None)]
    assert got.per_sample == ()


def test_crashed_unscored_and_unanswered_are_three_things_and_none_is_wrong(tmp_path: Path) -> None:
    score = (
        "from unbroken.evaluate.scoring.judge import Unscored\n"
        "def score(row, output):\n"
        "    if row['a'] == 1: raise KeyError('gold')\n"
        "    if row['a'] == 2: raise Unscored('the judge was silent')\n"
        "    if row['a'] == 3: return None\n"
        "    return 1.0\n"
    )
    suite = write_task(tmp_path, score=score)
    prepared, answers, _ = run(suite, tmp_path / "p")
    answers[4] = replace(answers[4], outputs=(), problem="HTTP 503")
    got = PlainHarness().score(prepared, answers)
    assert [(n.sample, n.status) for n in got.notes] == [
        (1, "crashed"), (2, "unscored"), (3, "unscored"), (4, "unanswered"),
    ]  # fmt: skip
    assert got.notes[0].why == "KeyError: 'gold'"
    assert (got.scored, got.coverage, got.metrics[0].value) == (6, 0.6, 1.0)


def test_threads_score_rows_at_once_and_in_order(tmp_path: Path) -> None:
    score = (
        "import threading\nTHREADS = 5\nMEET = threading.Barrier(5, timeout=20)\n"
        "def score(row, output):\n    MEET.wait()\n    return row['a']\n"
    )
    _, _, got = run(write_task(tmp_path, score=score), tmp_path / "p")
    assert got.per_sample == tuple(float(i) for i in range(10))


def test_mistakes_are_told_with_their_place(tmp_path: Path) -> None:
    def refused(kind: type[Exception], says: str, **more: str | int) -> None:
        suite = write_task(tmp_path, **more)  # type: ignore[arg-type]
        with pytest.raises(kind, match=says) as e:
            PlainHarness().prepare(suite.tasks[0], suite, SPEC, None, tmp_path / "p")
        assert "sums" in str(e.value)

    refused(InputError, "infer.py cannot be imported: SyntaxError", infer="def prompt(row:\n")
    refused(InputError, "defines neither", infer="x = 1\n")
    refused(InputError, "defines no score", score="x = 1\n")
    refused(
        InputError, r"prompt\(row\) raised KeyError: 'c'", infer="def prompt(row):\n    return row['c']\n"
    )
    (tmp_path / "sums" / "data.jsonl").write_text('{"a": 1, "b": 2}\n{"a": \n')
    refused(InputError, r"data.jsonl:2", rows=0)
    (tmp_path / "sums" / "data.jsonl").unlink()
    refused(DatasetMissing, "not on this machine", rows=0)


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    suite = write_task(tmp_path)
    harness = PlainHarness()
    assert harness.list_tasks(suite) == ["sums"]
    with pytest.raises(UnknownTask, match="Did you mean 'sums'"):
        harness.expand(Task("sum", harness="plain"), suite)
    with pytest.raises(UnknownKey, match="data"):
        harness.expand(Task("sums", harness="plain", options={"date": "x"}), suite)


def test_the_version_follows_the_code(tmp_path: Path) -> None:
    one = run(write_task(tmp_path), tmp_path / "p")[0]
    two = run(write_task(tmp_path, score=RIGHT + "# changed\n"), tmp_path / "q")[0]
    assert one.version != two.version
    assert one.prompt_hash == two.prompt_hash


def test_infer_that_loses_a_row_is_found_out(tmp_path: Path) -> None:
    suite = write_task(tmp_path, "def infer(model, rows):\n    return rows[1:]\n")
    with pytest.raises(EvaluationError, match="3 outputs for 4 rows"):
        run(suite, tmp_path / "p")


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    infer = (
        "def load(folder, devices):\n    return {'folder': folder, 'calls': 0}\n"
        "def infer(model, rows):\n    model['calls'] += 1\n    return [str(r['a'] + r['b']) for r in rows]\n"
    )
    suite = write_task(tmp_path, infer)
    spec = ModelSpec(
        str(tmp_path),
        backend="unbroken.evaluate.harness.plain:PlainBackend",
        batch_size=2,
        options={"infer": str(tmp_path / "sums" / "infer.py")},
    )
    model = PlainBackend().load(spec, tmp_path, ())
    harness = PlainHarness()
    prepared = harness.prepare(suite.tasks[0], suite, spec, None, tmp_path / "p")
    answers = [
        a
        for b in range(prepared.blocks)
        for a in harness.run(model, prepared, staged.read_block(prepared, b))
    ]
    assert harness.score(prepared, answers).metrics[0].value == 1.0
    assert model.halve()
    assert model.conditions.batch_size == 1
    assert not model.halve()
    model.restore()
    assert model.conditions.batch_size == 2
    broken = write_task(
        tmp_path / "broken", "def load(folder, devices):\n    raise OSError('no such weights')\n"
    )
    with pytest.raises(ModelDoesNotLoad, match="no such weights"):
        PlainBackend().load(
            replace(spec, options={"infer": str(Path(broken.folder) / "sums" / "infer.py")}), tmp_path, ()
        )


def test_its_size_is_known_before_anything_is_prepared(tmp_path: Path) -> None:
    size = PlainHarness().size
    suite = write_task(tmp_path, infer="import no_such_library\n" + SUMS)
    assert size(suite.tasks[0], suite) == 10
    write_task(tmp_path, infer=SUMS + "def rows():\n    raise AssertionError\n")
    assert size(suite.tasks[0], suite) is None
    (tmp_path / "rows.jsonl").write_text("{}\n\n{}\n")
    assert size(replace(suite.tasks[0], options={"data": "rows.jsonl"}), suite) == 2


@pytest.mark.parametrize(
    ("file", "text", "error", "says"),
    [
        ("data.jsonl", None, DatasetMissing, "not on this machine"),
        ("data.jsonl", "\n", InputError, "has no rows"),
        ("data.jsonl", "{}\n{\n", InputError, "data.jsonl:2"),
        ("data.jsonl", "\udcff", InputError, "no text in UTF-8"),
        ("infer.py", "def prompt(row:\n", InputError, "infer.py cannot be imported: SyntaxError"),
        ("score.py", "def score(:\n", InputError, "score.py cannot be imported: SyntaxError"),
        ("score.py", None, UnknownTask, "no task 'sums'"),
    ],
)
def test_what_has_no_size_is_told_as_the_run_would(
    tmp_path: Path, file: str, text: str | None, error: type[Exception], says: str
) -> None:
    suite = write_task(tmp_path)
    place = tmp_path / "sums" / file
    place.unlink()
    if text is not None:
        place.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(error, match=says):
        PlainHarness().size(suite.tasks[0], suite)
