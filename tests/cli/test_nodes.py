"""`unbroken nodes`, over a fake set of Slurm's commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.slurm.fake import FakeNode, FakeSlurm
from unbroken.cli.main import dispatch
from unbroken.cluster.slurm import cluster


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    found = FakeSlurm(tmp_path, {"n1": FakeNode(), "n2": FakeNode("IDLE+DRAIN", "new cables")})
    monkeypatch.setattr(cluster, "Slurm", lambda: found)
    return found


def test_a_node_is_listed_put_out_of_use_and_given_back(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["nodes", "ls"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:2] == ["n1", "mixed"] and "out of use" not in out[0]
    assert "out of use by root for good: new cables" in out[1]
    assert dispatch(["nodes", "cordon", "n1", "--reason", "XID 79", "--for", "2h", "--owner", "alice"]) == 0
    assert slurm.nodes["n1"].reason.startswith("XID 79 [unbroken: owner alice, expires ")
    assert dispatch(["nodes", "ls", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out.partition("\n")[2])["nodes"]
    assert listed[0]["cordon"]["owner"] == "alice"
    assert dispatch(["nodes", "release", "n1", "--owner", "bob"]) == 10
    assert "Ask alice: XID 79" in capsys.readouterr().err
    assert dispatch(["nodes", "release", "n1", "--owner", "alice"]) == 0
    assert slurm.nodes["n1"].states == "MIXED"


def test_what_cannot_be_done_is_said(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.operator = False
    assert dispatch(["nodes", "cordon", "n1", "--reason", "slow"]) == 10
    assert "this user may not drain nodes" in capsys.readouterr().err
    assert dispatch(["nodes", "cordon", "n1", "--reason", " "]) == 2
    assert dispatch(["nodes", "release", "n9"]) == 10
    assert "knows no such node" in capsys.readouterr().err
    assert dispatch(["nodes", "ls", "--cluster", "local"]) == 2
    assert "Clusters with nodes of their own: kubernetes, slurm" in capsys.readouterr().err
