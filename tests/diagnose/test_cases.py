"""The promise on labelled cases: the public corpus where it is at hand, and generated ones everywhere."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.failure_logs import KINDS, generate, make, write
from unbroken.diagnose import REASONS, diagnose

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_diagnosis", REPO / "benchmarks" / "diagnosis.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scored(benchmark: Any, shared_data: Path) -> dict[str, Any]:
    """What the benchmark says of both corpora, read once."""
    return {
        name: benchmark.score(shared_data / name, benchmark.ours, False)
        for name in ("failure_logs", "failure_logs_wild")
    }


PROMISE = {
    "reason": 0.95, "category": 0.98, "evidence": 0.95, "faulty": 0.90, "recoverable": 0.92, "cordon": 0.95,
    "no false alarm": 1.0, "no wrong stop": 1.0,
}  # fmt: skip


def test_the_public_cases(scored: dict[str, Any]) -> None:
    result = scored["failure_logs"]
    figures = result["figures"]
    assert figures["reason"]["of"] >= 60
    assert not {k: figures[k] for k, least in PROMISE.items() if figures[k]["share"] < least}, result["wrong"]


def test_the_wild_cases(benchmark: Any, scored: dict[str, Any]) -> None:
    """Kinds of logs that the first corpus lacks: what must be found in them, and what must never be said."""
    result = scored["failure_logs_wild"]
    figures = {k: f["right"] for k, f in result["figures"].items()}
    assert figures["acceptable reason"] >= 52 and figures["evidence"] >= 50, result["wrong"]
    for never in ("no false alarm", "no wrong stop"):
        assert result["figures"][never]["share"] == 1.0, result["wrong"]
    assert benchmark.calibration(result["answers"])["certain_and_wrong"] == 0, result["wrong"]


def test_stated_confidence_holds_on_both(benchmark: Any, scored: dict[str, Any]) -> None:
    told = benchmark.calibration([a for result in scored.values() for a in result["answers"]])
    assert told["at_0.9"]["answers"] >= 60 and told["at_0.9"]["share"] >= 0.97
    assert all(row["share"] >= row["stated"] - 0.15 for row in told["bins"]), told["bins"]


def test_calibration_counts(benchmark: Any) -> None:
    told = benchmark.calibration([(0.95, True), (0.9, False), (0.85, False), (0.3, True)])
    assert told["at_0.9"] == {"answers": 2, "right": 1, "share": 0.5} and told["certain_and_wrong"] == 2
    assert [(b["from"], b["answers"], b["right"]) for b in told["bins"]] == [
        (0.0, 1, 1),
        (0.8, 1, 0),
        (0.9, 2, 1),
    ]


def test_generated_cases_of_every_kind(benchmark: Any, tmp_path: Path) -> None:
    generate(tmp_path, len(KINDS), 11)
    result = benchmark.score(tmp_path, benchmark.ours, False)
    assert not {
        k: result["figures"][k] for k, least in PROMISE.items() if result["figures"][k]["share"] < least
    }, result["wrong"]


def test_baselines_do_worse_and_alarm_falsely(benchmark: Any, tmp_path: Path) -> None:
    generate(tmp_path, len(KINDS), 11)
    shares = {
        n: benchmark.score(tmp_path, contender, False)["figures"]["reason"]["share"]
        for n, contender in benchmark.CONTENDERS.items()
    }
    assert all(0.1 < s < shares["unbroken"] - 0.1 for n, s in shares.items() if n != "unbroken"), shares


def test_the_generator_is_deterministic_and_labels_its_own_line() -> None:
    assert {k.reason for k in KINDS} >= set(REASONS)
    for kind in KINDS:
        lines, label = make(kind, "titan", 7, 3)
        assert (lines, label) == make(kind, "titan", 7, 3)
        assert label["evidence"] and lines[label["evidence_line"] - 1]


def test_real_endings_that_are_no_failures(shared_data: Path) -> None:
    folder = shared_data / "logs" / "slurm_endings"
    for name, outcome in (("cancelled.out", "cancelled"), ("time_limit.out", "time_limit")):
        v = diagnose([folder / name])
        assert (v.outcome.value, v.reason) == (outcome, None)


def test_a_case_written_can_be_read(tmp_path: Path) -> None:
    lines, label = make(KINDS[0], "hf", 1)
    write(tmp_path, "g1", lines, label)
    assert json.loads((tmp_path / "g1" / "case.json").read_text())["reason"] == KINDS[0].reason
    v = diagnose([tmp_path / "g1"])
    assert v.root is not None and v.root.file == "log.txt" and v.root.line == label["evidence_line"]


def compare_redacted(benchmark: Any, folder: Path, cases: list[str]) -> None:
    for case in cases:
        label = json.loads((folder / case / "case.json").read_text())
        plain, redacted = benchmark.ours(folder / case), benchmark.redacted(folder / case)
        assert benchmark.judge(label, redacted) == benchmark.judge(label, plain), case
        assert (redacted.reason, redacted.action) == (plain.reason, plain.action), case


def test_some_cases_score_the_same_on_redacted_logs(benchmark: Any, shared_data: Path) -> None:
    folder = shared_data / "failure_logs_wild"
    small = [c.name for c in sorted(folder.iterdir()) if sum(f.stat().st_size for f in c.iterdir()) < 60_000]
    assert len(small) >= 30
    compare_redacted(benchmark, folder, small[::4])


PARTS = 24
"""The first corpus is 74 MB unpacked, and redacting takes minutes: no part may take as long as a test may."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, PARTS))]
)
@pytest.mark.parametrize("corpus", ["failure_logs", "failure_logs_wild"])
def test_all_cases_score_the_same_on_redacted_logs(
    benchmark: Any, shared_data: Path, corpus: str, part: int
) -> None:
    folder = shared_data / corpus
    sizes = {c.name: sum(f.stat().st_size for f in c.rglob("*")) for c in folder.iterdir() if c.is_dir()}
    cases = sorted(sizes, key=lambda name: (sizes[name], name))  # the large ones in different parts
    assert len(cases) > PARTS
    compare_redacted(benchmark, folder, cases[part::PARTS])
