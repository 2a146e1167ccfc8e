"""`unbroken doctor` says how processes would be held, and leaves nothing behind."""

from __future__ import annotations

import json

import pytest

from unbroken.cli.cluster.doctor import describe_counters, examine
from unbroken.cli.main import dispatch
from unbroken.cluster.holding.cgroups import Cgroups
from unbroken.cluster.local_events import LocalCluster
from unbroken.testing.nvml import FakeGpu, FakeNvml


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


def test_it_says_whether_slow_ranks_are_told_by_the_gpus_counters() -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    assert describe_counters(nvml).good and nvml.live_samples == 0
    for gpu in (FakeGpu(gpm=False), FakeGpu(split=True)):
        lacks = describe_counters(FakeNvml([FakeGpu(), gpu]))
        assert not lacks.good and "1 of 2" in lacks.text and "busy=" in lacks.text
