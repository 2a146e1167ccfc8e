"""The policy's table: what a doubtful verdict may not do, how many nodes may go, and what a file may say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.diagnose import Facts
from unbroken.errors import InputError, UnbrokenError
from unbroken.progress import Budgets, Policy, RunDir, RunSpec, read_policy, read_spec, write_spec
from unbroken.progress.records.decision import PastIncident
from unbroken.progress.records.state import RunState
from unbroken.progress.records.verdict import Action, Category, Outcome, Root, Verdict
from unbroken.recover.decide.policy import decide

ECC = Verdict(
    Outcome.FAILED, Category.INFRASTRUCTURE, "ECCError", Root(text="ecc"), recoverable=True, action=Action.RESTART_ELSEWHERE,
    cordon=("node-003",), confidence=0.9, decided_by="test",
)  # fmt: skip
BUG = Verdict(
    Outcome.FAILED, Category.SCRIPT, "KeyError", Root(text="key"), action=Action.STOP, confidence=0.9, decided_by="test"
)  # fmt: skip
NOW = 10_000.0
AT_5 = Facts(step=5, run_step=5, noticed=NOW)


KEEP = Policy(on_doubt="keep")


def test_a_doubtful_verdict_takes_no_node_out_of_use_and_says_so() -> None:
    assert decide(ECC, AT_5, [], Budgets(), 2).exclude == ("node-003",)
    d = decide(replace(ECC, confidence=0.59), AT_5, [], Budgets(), 2, KEEP)
    assert (d.action, d.exclude) == (Action.RESTART, ())
    assert "node-003 stays in use: the verdict is 59% sure" in d.why
    assert decide(replace(ECC, confidence=0.59), AT_5, [], Budgets(), 2, Policy(cordon_at=0.5)).exclude


def test_who_may_be_at_fault_leaves_at_once_and_is_tested_where_there_are_spares() -> None:
    unsure = replace(ECC, confidence=0.59)
    d = decide(unsure, AT_5, [], Budgets(), 2)
    assert (d.action, d.exclude, d.suspects) == (Action.RESTART_ELSEWHERE, (), ("node-003",))
    assert "leaves at once and is tested aside" in d.why and "stays" not in d.why
    assert not decide(unsure, AT_5, [], Budgets(), 0).suspects, "nobody could take its place"
    assert not decide(unsure, AT_5, [], Budgets(), 2, cordons=[(NOW, "x")] * 8).suspects, (
        "a detector gone mad"
    )
    pair = replace(unsure, cordon=("node-003", "node-004"))
    assert decide(pair, AT_5, [], Budgets(), 2).suspects == ("node-003", "node-004")
    assert not decide(pair, AT_5, [], Budgets(), 1).suspects, "the group that surely holds it, or nobody"
    assert not decide(replace(BUG, action=Action.RESTART, recoverable=True), AT_5, [], Budgets(), 2).suspects


def test_the_second_incident_within_an_hour_that_names_nobody_asks_for_a_test_of_all() -> None:
    nobody = replace(ECC, cordon=(), reason="NCCLTimeoutError")
    first = decide(nobody, AT_5, [], Budgets(), 2)
    later = Facts(step=50, run_step=50, noticed=NOW + 3000)
    assert not first.test_pairs and not first.charged.named
    assert decide(nobody, later, [first.charged], Budgets(), 2).test_pairs
    assert not decide(nobody, replace(later, noticed=NOW + 4000), [first.charged], Budgets(), 2).test_pairs
    assert not decide(nobody, later, [first.charged], Budgets(), 2, KEEP).test_pairs
    assert not decide(ECC, later, [first.charged], Budgets(), 2).test_pairs, "it names one"


def test_a_doubtful_verdict_stops_no_run_by_itself_but_the_same_failure_again_does() -> None:
    doubtful = replace(BUG, confidence=0.4)
    assert decide(BUG, AT_5, [], Budgets(), 0).action is Action.STOP
    first = decide(doubtful, AT_5, [], Budgets(), 0)
    assert first.action is Action.RESTART and "only 40% sure" in first.why
    second = decide(doubtful, AT_5, [first.charged], Budgets(), 0)
    assert second.action is Action.STOP and "came twice" in second.why


def test_a_detector_gone_mad_cannot_empty_the_cluster() -> None:
    cordons: list[tuple[float, str]] = []
    history: list[PastIncident] = []
    taken: list[str] = []
    for k in range(60):
        verdict = replace(
            ECC, reason=("ECCError", "NVLinkError", "CUDAError")[k % 3], cordon=(f"node-{k:03d}",)
        )
        facts = Facts(step=100 * k, run_step=100 * k, noticed=NOW + 10 * k)
        d = decide(verdict, facts, history, Budgets(), 200, Policy(), cordons)
        history.append(d.charged)
        cordons += [(NOW + 10 * k, str(verdict.reason)) for _ in d.exclude]
        taken += d.exclude
    assert len(taken) == 8, "an hour's worth"
    assert "see whether the detection is right" in d.why
    later = replace(facts, noticed=NOW + 2 * 3600)
    assert decide(verdict, later, history[:1], Budgets(), 200, Policy(), cordons).exclude, (
        "the next hour has its own"
    )


def test_one_reason_has_fewer_than_all_together() -> None:
    cordons = [(NOW - 60, "ECCError")] * 4
    d = decide(ECC, AT_5, [], Budgets(), 9, Policy(), cordons)
    assert not d.exclude and "4 nodes were taken out of use for ECCError" in d.why
    assert decide(replace(ECC, reason="CUDAError"), AT_5, [], Budgets(), 9, Policy(), cordons).exclude


def test_lost_nodes_go_whatever_the_policy_says() -> None:
    facts = Facts(step=5, run_step=5, noticed=NOW, lost_nodes=("node-003",))
    d = decide(replace(ECC, confidence=0.1), facts, [], Budgets(), 1, Policy(cordons_per_hour=0), [])
    assert d.exclude == ("node-003",)


def test_the_journal_tells_when_nodes_were_taken_out_of_use() -> None:
    state = RunState.of([{"kind": "cordon", "node": "n", "reason": "ECCError", "t": 5.0}])
    assert state.cordons == [(5.0, "ECCError")]


def test_a_policy_file_says_what_differs_and_run_toml_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("[policy]\ncordon_at = 0.8\n[budgets]\nhang = 9\n")
    policy, budgets = read_policy(path)
    assert (policy, budgets) == (Policy(cordon_at=0.8), Budgets(hang=9))
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    spec = RunSpec(("train.py",), "abc", policy=policy, budgets=budgets)
    write_spec(run_dir, spec)
    assert read_spec(run_dir.spec) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[policy]\ncordon = 0.8\n", "cordon_at"),
        ("[polcy]\ncordon_at = 0.8\n", "policy"),
        ("[policy]\ncordon_at = 80\n", "from 0 to 1"),
        ("[policy]\ncordons_per_hour = true\n", "whole number"),
        ("[policy\n", "cannot be read"),
        ("policy = 3\n", "must be a table"),
    ],
)
def test_what_a_policy_file_says_wrong_is_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(UnbrokenError) as e:
        read_policy(path)
    assert says in str(e.value)


def test_a_policy_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_policy(tmp_path / "none.toml")


def test_the_page_shows_the_defaults_as_they_are(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "policy.md"
    path = tmp_path / "policy.toml"
    path.write_text(page.read_text().split("```toml\n")[1].split("```")[0])
    assert read_policy(path) == (Policy(), Budgets())
