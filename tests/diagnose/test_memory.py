"""Past incidents are found again, corrected by people, and used where rules do not decide."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.diagnose import Verdict, examine
from unbroken.diagnose.assist.incident_store import IncidentStore, overlap, recall
from unbroken.diagnose.assist.model import AssistantConfig, HttpModel
from unbroken.diagnose.compress import FilterRule
from unbroken.diagnose.match.rules import Rule, builtin_set
from unbroken.errors import DiagnoseError, UsageError
from unbroken.testing.llm import FakeAssistant

from .logs import job, steps, traceback


def strange(folder: Path, lane: int) -> Path:
    return job(
        folder,
        steps(20)
        + f"[rank1]: FluxCapacitorFault: phase inversion on lane {lane} of regulator {lane}\n"
        + traceback(f"vendor.FluxCapacitorProblem: phase inversion on lane {lane}", 1),
    )


@pytest.fixture
def memory(tmp_path: Path) -> IncidentStore:
    return IncidentStore(tmp_path / "store" / "incidents.sqlite")


def test_the_same_logs_are_one_incident(tmp_path: Path, memory: IncidentStore) -> None:
    d = examine([strange(tmp_path / "a", 1)])
    assert memory.record(d) == memory.record(d)
    assert len(memory.incidents()) == 1


def test_a_correction_teaches_the_next_one(tmp_path: Path, memory: IncidentStore) -> None:
    first = examine([strange(tmp_path / "a", 1)])
    assert first.verdict.reason == "RuntimeError" and first.verdict.confidence <= 0.5
    incident = memory.record(first)
    memory.correct(incident, "NVLinkError", "the regulator board of rack 7")
    second = examine([strange(tmp_path / "b", 2)])
    similar = memory.similar(second)
    assert similar[0].id == incident and similar[0].score > 0.9 and similar[0].confirmed
    v = recall(second, similar)
    assert (v.reason, v.decided_by, v.action.value) == ("NVLinkError", "retrieval", "restart_elsewhere")
    assert any("rack 7" in n for n in v.notes)
    assert memory.record(first) == incident
    assert memory.incidents()[0].reason == "NVLinkError", "diagnosing again does not undo a correction"


def test_unconfirmed_incidents_decide_nothing(tmp_path: Path, memory: IncidentStore) -> None:
    memory.record(examine([strange(tmp_path / "a", 1)]))
    second = examine([strange(tmp_path / "b", 2)])
    assert recall(second, memory.similar(second)) == second.verdict


def test_sure_rules_are_not_overruled_by_something_vaguely_alike(
    tmp_path: Path, memory: IncidentStore
) -> None:
    key = examine([job(tmp_path / "a", steps(9) + traceback("KeyError: 'optimizer'"))])
    incident = memory.record(key)
    memory.correct(incident, "ModelLoadingError")
    other = examine([job(tmp_path / "b", steps(9) + traceback("KeyError: 'scheduler state'"))])
    assert recall(other, memory.similar(other)).reason == "KeyError"


def test_unknown_ids_and_reasons_are_said(memory: IncidentStore) -> None:
    with pytest.raises(UsageError, match="no incident"):
        memory.correct("i0", "ECCError")
    with pytest.raises(UsageError, match=r"ECCError"):
        memory.correct("i0", "ECCEror")


def rule(regex: str, reason: str = "NVLinkError") -> Rule:
    return Rule(
        id="model-x",
        regex=regex,
        role="root",
        reason=reason,
        source="model",
        example="phase inversion on lane 3",
    )


def test_a_candidate_needs_confirmation_and_may_break_nothing(tmp_path: Path, memory: IncidentStore) -> None:
    d = examine([strange(tmp_path / "a", 1)])
    incident = memory.record(d, [e.text for e in d.timeline.candidates])
    memory.propose(rule(r"phase inversion on lane"), "test")
    with pytest.raises(UsageError, match="would break"):
        memory.accept("model-x")
    memory.correct(incident, "NVLinkError")
    assert memory.try_rule(rule(r"phase inversion on lane")) == (1, [])
    memory.accept("model-x")
    assert [r.id for r in memory.accepted_rules()] == ["model-x"]
    with pytest.raises(UsageError, match="no candidate"):
        memory.accept("model-y")
    memory.reject("model-x")
    assert memory.accepted_rules() == []
    memory.propose(rule("again"), "test")
    assert memory.rules()[0].state == "rejected", "what a person rejected is not proposed again"


def test_a_candidate_that_no_incident_confirms_is_not_adopted(memory: IncidentStore) -> None:
    memory.propose(rule("never seen anywhere"), "test")
    with pytest.raises(UsageError, match="no stored incident confirms"):
        memory.accept("model-x")


def test_filters_are_kept_per_task(memory: IncidentStore) -> None:
    memory.keep_filters("7b", [FilterRule("metric-step", "metric", "^step", "step 1")])
    assert [f.name for f in memory.filters("7b")] == ["metric-step"]
    assert memory.filters("70b") == []


def test_a_broken_store_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"this is no database, whatever its name says" * 50)
    with pytest.raises(DiagnoseError, match="--no-memory"):
        IncidentStore(tmp_path / "x.sqlite").incidents()
    with pytest.raises(DiagnoseError):
        IncidentStore(Path("/proc/nowhere/x.sqlite")).incidents()


def test_vectors_find_what_shares_no_words(tmp_path: Path) -> None:
    with FakeAssistant([""]) as url:
        memory = IncidentStore(tmp_path / "v.sqlite", HttpModel(AssistantConfig(url, embedding="e")).embed)
        incident = memory.record(examine([strange(tmp_path / "a", 1)]))
        found = memory.similar(examine([strange(tmp_path / "b", 2)]))
    assert found and found[0].id == incident


def test_overlap_is_a_share() -> None:
    assert overlap("a b c", "a b c") == 1.0 and overlap("a b", "c d") == 0.0 and overlap("", "a") == 0.0


def test_verdicts_survive_json(tmp_path: Path) -> None:
    v = examine([strange(tmp_path / "a", 1)]).verdict
    assert Verdict.from_json(v.as_json()) == v
    assert builtin_set().get("py-other") is not None


SECRET = "hf_" + "Qx7Lm2" * 6


def leaky(folder: Path) -> Path:
    return job(
        folder, steps(9) + f"login alice.smith@corp.example.org with {SECRET}\n" + traceback(f"RuntimeError: hub said no to {SECRET} at 10.11.12.13"),
    )  # fmt: skip


def everything(path: Path) -> bytes:
    return b"".join(f.read_bytes() for f in path.parent.glob(path.name + "*"))


def test_the_store_is_its_owners_and_holds_no_secret(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        memory = IncidentStore(tmp_path / "deep" / "m.sqlite")
        d = examine([leaky(tmp_path / "a")])
        assert SECRET in (d.verdict.root.text if d.verdict.root else "")
        memory.record(d, [e.text for e in d.timeline.candidates] + [f"--token {SECRET}"])
        memory.propose(replace(rule("never"), example=f"token={SECRET}"), f"proposed for {SECRET}")
        memory.keep_filters(
            "t", [FilterRule("a", "metric", f"^{SECRET}", "x"), FilterRule("b", "metric", "^step", SECRET)]
        )
    finally:
        os.umask(old)
    assert stat.S_IMODE(memory.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(memory.path.parent.stat().st_mode) == 0o700
    for what in (SECRET, SECRET[3:], "alice.smith", "10.11.12.13"):
        assert what.encode() not in everything(memory.path)
    assert [f.name for f in memory.filters("t")] == ["b"], (
        "an expression that spells out a secret is not kept"
    )
    assert "hub said no to" in memory.incidents()[0].text


def test_a_store_of_before_is_redacted_and_closed_when_it_is_opened(tmp_path: Path) -> None:
    memory = IncidentStore(tmp_path / "m.sqlite")
    incident = memory.record(examine([leaky(tmp_path / "a")]))
    with sqlite3.connect(memory.path) as db:
        db.execute("pragma user_version = 0")
        db.execute(
            "update incidents set root = ?, lines = ?, signature = ?",
            (f"no to {SECRET}", json.dumps([SECRET]), f"hub {SECRET}"),
        )
    db.close()
    memory.path.chmod(0o644)
    assert SECRET.encode() in everything(memory.path)
    assert memory.incidents()[0].text == "no to <token>"
    assert SECRET.encode() not in everything(memory.path)
    assert stat.S_IMODE(memory.path.stat().st_mode) == 0o600
    memory.correct(incident, "ConnectionError")
    assert memory.incidents()[0].confirmed


def test_what_is_sent_to_an_embedding_service_is_redacted(tmp_path: Path) -> None:
    sent: list[str] = []
    memory = IncidentStore(tmp_path / "m.sqlite", lambda texts: (sent.extend(texts), [[1.0]] * len(texts))[1])
    d = examine([leaky(tmp_path / "a")])
    memory.record(d)
    memory.similar(d)
    assert len(sent) == 2 and not any("alice" in t or SECRET[3:] in t for t in sent)


def test_a_read_only_store_writes_nothing(tmp_path: Path) -> None:
    absent = IncidentStore(tmp_path / "none" / "m.sqlite", read_only=True)
    assert absent.incidents() == [] and absent.rules() == []
    assert not (tmp_path / "none").exists()
    memory = IncidentStore(tmp_path / "m.sqlite")
    memory.record(examine([strange(tmp_path / "a", 1)]))
    before = memory.path.read_bytes()
    again = IncidentStore(memory.path, read_only=True)
    assert again.similar(examine([strange(tmp_path / "b", 2)]))
    with pytest.raises(DiagnoseError):
        again.record(examine([strange(tmp_path / "c", 3)]))
    assert memory.path.read_bytes() == before
