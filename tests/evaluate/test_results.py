from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from unbroken.evaluate.contracts import Metric, Report, SampleNote, Score
from unbroken.evaluate.results import compare, differences, p_value, table
from unbroken.testing.fake_reports import fake_report


def score(task: str, values: list[float], **more: object) -> Score:
    n = len(values)
    mean = sum(values) / n
    stderr = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return Score(
        task, (Metric("acc", mean, stderr),), n, n, prompt_hash="p", per_sample=tuple(values), **more
    )  # type: ignore[arg-type]


def flips(r: random.Random, values: list[float], down: int) -> list[float]:
    out = list(values)
    for i in r.sample([i for i, v in enumerate(values) if v == 1.0], down):
        out[i] = 0.0
    return out


def test_a_fall_on_the_same_samples_is_seen_where_two_means_do_not_show_it() -> None:
    r = random.Random(0)
    before = [float(r.random() < 0.6) for _ in range(1000)]
    after = flips(r, before, 25)
    paired = compare([score("t", before)], [score("t", after)])[0]
    assert (paired.verdict, paired.paired) == ("worse", True)
    other = score("t", after)
    apart = compare([score("t", before)], [Score("t", other.metrics, 1000, 1000)])[0]
    assert (apart.verdict, apart.paired) == ("same", False)


def test_equal_models_are_flagged_as_rarely_as_promised() -> None:
    """500 comparisons of 20 tasks with nothing but chance between them, at one in a hundred."""
    r = random.Random(5)
    flagged = 0
    for _ in range(500):
        pair = [
            [Score(f"t{i}", (Metric("acc", r.gauss(0.5, 0.01), 0.01),), 100, 100) for i in range(20)]
            for _ in range(2)
        ]
        flagged += any(d.verdict in ("worse", "better") for d in compare(*pair))
    assert flagged <= 15


def test_direction_and_unknown() -> None:
    def one(v: float, **more: object) -> list[Score]:
        return [Score("t", (Metric("ppl", v, **more),), 9, 9)]  # type: ignore[arg-type]

    assert (
        compare(one(5.0, stderr=0.1, higher_is_better=False), one(9.0, stderr=0.1, higher_is_better=False))[
            0
        ].verdict
        == "worse"
    )
    assert (
        compare(one(5.0, stderr=0.1, higher_is_better=False), one(2.0, stderr=0.1, higher_is_better=False))[
            0
        ].verdict
        == "better"
    )
    assert compare(one(5.0), one(9.0))[0].verdict == "unknown"
    assert compare(one(5.0), one(5.0))[0].verdict == "same"
    assert compare(one(5.0), [Score("other", (), 0, 0)]) == []


def test_p_values() -> None:
    assert p_value(1.96, 1.0) == pytest.approx(0.05, abs=1e-3)
    assert p_value(0, 0) == 1.0
    assert p_value(1, 0) == 0.0


def test_the_table_says_what_is_missing() -> None:
    s = Score(
        "t",
        (Metric("acc,none", 0.5, 0.01),),
        10,
        8,
        (SampleNote(3, "unscored", "judge timed out"), SampleNote(4, "unanswered", "500")),
    )
    text = table(
        Report("suite", "model", "c" * 32, 0.0, 10.0, (s,), {"u": "no data"}, (), (), (), 5.0, 20.0, 0.9)
    )
    assert "0.5000 ± 0.0100" in text and "8/10" in text
    assert "1 unanswered, 1 unscored; sample 3: judge timed out" in text
    assert "u: no score: no data" in text
    assert "no GPU was taken" in text


def test_differences_as_text() -> None:
    text = differences(compare([score("t", [1.0, 0.0] * 50)], [score("t", [0.0, 0.0] * 50)]))
    assert "worse" in text and "-0.5000" in text


def test_nodes_without_compiled_bytecode_are_told() -> None:
    report = fake_report()
    assert "bytecode" not in table(report)
    slow = replace(report, workers=tuple(replace(w, uncompiled=2610) for w in report.workers))
    nodes = ", ".join(sorted({w.node for w in report.workers}))
    line = next(line for line in table(slow).splitlines() if "bytecode" in line)
    assert (
        line.startswith(f"Starts on {nodes} are slower") and "2,610 modules" in line and "compileall" in line
    )
