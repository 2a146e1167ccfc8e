"""`unbroken doctor` says how processes would be held, and leaves nothing behind."""

from __future__ import annotations

import json

import pytest

from unbroken.cli.cluster.doctor import examine
from unbroken.cli.main import dispatch
from unbroken.cluster.holding.cgroups import Cgroups
from unbroken.cluster.local_events import LocalCluster


def test_it_says_how_processes_are_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["doctor", "--json"]) == 0
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert LocalCluster("doctortest").describe_holding() in findings["processes"]["text"]
    assert dispatch(["doctor"]) == 0
    assert "processes" in capsys.readouterr().out


def test_where_there_is_no_cgroup_it_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cgroups, "find", classmethod(lambda cls, run_id: (None, "it is read-only")))
    finding = examine()[0]
    assert finding.good and "a small parent process" in finding.text and "it is read-only" in finding.text
    assert "systemd-run --user" in finding.text
