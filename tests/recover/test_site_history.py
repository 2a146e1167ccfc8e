"""The history of nodes over all runs: it decays, follows a GPU that was moved, and is read whatever one writer left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unbroken.cli.main import dispatch
from unbroken.diagnose import Facts
from unbroken.progress import Budgets, Policy
from unbroken.progress.records.verdict import Action, Category, Faulty, Outcome, Verdict
from unbroken.recover.decide.policy import decide
from unbroken.recover.site.history import HALF_LIFE_S, NodeIncident, find_avoided, find_lemons
from unbroken.recover.site.store import SiteHistory

NOW = 1.8e9


def incident(node: str, ago_s: float = 0.0, gpu: str = "", sure: float = 0.9, run: str = "r") -> NodeIncident:
    return NodeIncident(NOW - ago_s, run, 1, node, "ECCError", sure, gpu)


def test_what_is_old_counts_for_less(tmp_path: Path) -> None:
    site = SiteHistory(tmp_path / "site", "run/1")
    site.note_incident(incident("a"))
    site.note_incident(incident("a", run="other"))
    site.note_incident(incident("b", ago_s=2 * HALF_LIFE_S))
    scores = SiteHistory(tmp_path / "site", "another").score(NOW)
    assert scores["a"].score == pytest.approx(1.8) and scores["a"].runs == 2
    assert scores["b"].score == pytest.approx(0.9 / 4)
    assert find_avoided(scores) == ["a"] and find_avoided(SiteHistory(tmp_path, "x").score(NOW)) == []
    later = SiteHistory(tmp_path / "site", "x").score(NOW + 2 * HALF_LIFE_S)
    assert find_avoided(later) == [], "it comes back by itself"


def test_a_gpu_that_was_moved_takes_its_history_along(tmp_path: Path) -> None:
    first, second = SiteHistory(tmp_path, "1"), SiteHistory(tmp_path, "2")
    first.note_gpus(NOW - 100, {"a": ("GPU-1", "GPU-2"), "b": ("GPU-3",)})
    first.note_incident(incident("a", 90, gpu="GPU-1"))
    first.note_incident(incident("a", 80, gpu="GPU-1"))
    assert find_avoided(first.score(NOW)) == ["a"]
    second.note_gpus(NOW - 10, {"b": ("GPU-1",), "a": ("GPU-3", "GPU-2")})
    assert find_avoided(second.score(NOW)) == ["b"] and second.score(NOW)["b"].gpus.keys() == {"GPU-1"}


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    site = SiteHistory(tmp_path, "r")
    site.note_incident(incident("a"))
    with open(tmp_path / "r.jsonl", "ab") as f:
        f.write(b'{"kind": "incident", "at": 1')  # its writer was killed
    (tmp_path / "x.jsonl").write_bytes(b'\xff\n[1]\n{"kind": "incident"}\n{"kind": "sighting", "at": "x"}\n')
    SiteHistory(tmp_path, "r").note_incident(incident("a"))
    assert site.score(NOW)["a"].incidents == 2


def test_a_history_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    site = SiteHistory(tmp_path / "file", "r")
    site.note_incident(incident("a"))
    assert site.score(NOW) == {}


def test_a_broken_detector_cannot_empty_a_site() -> None:
    from unbroken.recover.site.history import score_nodes

    many = [incident(f"n{i}") for i in range(100) for _ in range(3)]
    assert len(find_avoided(score_nodes(many, (), NOW))) == 8


def test_lemons_are_the_few_that_stand_for_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = SiteHistory(tmp_path, "r")
    for i in range(20):
        site.note_incident(NodeIncident(NOW, "r", i, f"n{i % 12}", "ECCError", 0.5))
    for i in range(20):
        site.note_incident(NodeIncident(NOW, "r", i, "lemon", "NodeFailure", 0.9, "GPU-9"))
    assert [s.node for s in find_lemons(site.score(NOW))] == ["lemon"]
    assert dispatch(["nodes", "history", str(tmp_path), "--lemons"]) == 0
    out = capsys.readouterr().out
    assert "1 of 13 nodes" in out and "20 x NodeFailure" in out and "GPU-9" in out
    assert dispatch(["nodes", "history", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["nodes"]) == 13


def test_history_makes_a_doubtful_verdict_count_and_never_convicts_alone() -> None:
    verdict = Verdict(
        Outcome.FAILED, Category.INFRASTRUCTURE, "CUDAError", faulty=Faulty("a", 0), recoverable=True, cordon=("a",),
        action=Action.RESTART_ELSEWHERE, confidence=0.45,
    )  # fmt: skip
    facts = Facts(step=5, nodes=((0, "a"),))

    def excluded(prior: float, sure: float = 0.45) -> tuple[str, ...]:
        from dataclasses import replace

        how = replace(verdict, confidence=sure)
        return decide(how, facts, [], Budgets(), 1, Policy(), (), {"a": prior}).exclude

    assert excluded(0.0) == () and excluded(0.4) == ("a",)
    assert excluded(0.5, sure=0.0) == (), "the most that a history alone comes to"
