"""What earlier versions left on disk is read, restored and gone on with: names, keys and meanings stay, or a schema rises.

The sets lie in data/, made by make.py and never changed. Each test works on a copy.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unbroken.cli.main import dispatch

DATA = Path(__file__).resolve().parent / "data"
SETS = sorted(p for p in DATA.iterdir() if p.is_dir())


@pytest.fixture(params=SETS, ids=lambda p: p.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one set."""
    return Path(shutil.copytree(request.param, tmp_path / "set"))


def expected(golden: Path, part: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((golden / "expected.json").read_text())[part]
    return value


def said(capsys: pytest.CaptureFixture[str], *words: object, codes: tuple[int, ...] = (0,)) -> Any:
    """The JSON object that a command prints."""
    capsys.readouterr()
    code = dispatch([str(w) for w in words])
    out = capsys.readouterr()
    assert code in codes, (words, code, out.err)
    return json.loads(out.out.splitlines()[0])


def test_there_is_a_set() -> None:
    assert SETS


@pytest.mark.parametrize("name", ["finished", "taken_over", "killed"])
def test_status_and_report_of_a_run(golden: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = golden / "runs" / name
    want = expected(golden, "runs")[name]
    status = said(capsys, "status", run, "--json")
    assert status["status"] == want["status"]
    assert dispatch(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<svg" in page


@pytest.mark.parametrize("name", ["finished", "taken_over", "killed"])
def test_checkpoints_of_a_run_verify(golden: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = golden / "runs" / name
    listed = said(capsys, "checkpoint", "ls", run, "--json")
    names = sorted(c["name"] for c in listed["checkpoints"] if c["status"] == "committed")
    assert names == expected(golden, "runs")[name]["checkpoints"]
    assert dispatch(["checkpoint", "verify", str(run)]) == 0


def test_incidents_of_a_run(golden: Path) -> None:
    from unbroken.progress import RunDir
    from unbroken.progress.records.incident import Incident, read_incidents

    for name, want in expected(golden, "runs").items():
        found = read_incidents(RunDir(golden / "runs" / name))
        assert [i["kind"] for i in found] == want["incidents"]
        assert [Incident.from_json(i).as_json() for i in found] == found


def test_a_killed_run_goes_on(golden: Path) -> None:
    """The seal and the journal of an older supervisor count: its newest checkpoint is where the next attempt starts."""
    from unbroken.progress import RunDir, read_journal
    from unbroken.progress.records.state import RunState

    state = RunState.of(read_journal(RunDir(golden / "runs" / "killed")).records)
    assert state.attempt == 1 and state.attempt_open and state.started is not None


@pytest.mark.integration
@pytest.mark.slow
def test_a_killed_run_is_finished_by_this_version(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command in the same folder goes on from the last checkpoint, and each step is done once."""
    from .make import TRAIN

    (golden / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, "-m", "unbroken", "run", "--run-dir", "runs/killed", "--nodes", "2", "--host-memory", "64MiB",
         "--", "train.py", "60", "0.05"],
        cwd=golden, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    newest = sorted((golden / "runs" / "killed" / "checkpoints").glob("step-00000060*"))
    assert newest, done.stdout
    from safetensors import safe_open

    with safe_open(newest[-1] / "rank-00000.safetensors", "np") as f:
        assert float(f.get_tensor("w")[0]) == 60.0


def test_every_type_comes_back_as_it_was(golden: Path) -> None:
    torch = pytest.importorskip("torch")
    from unbroken import Checkpointer

    from .make import tensors

    want, state = tensors(), tensors()
    for name in state["every"]:
        state["every"][name] = torch.zeros_like(state["every"][name])
    state["tied"]["a"].zero_()
    state["scalar"].zero_()
    c = Checkpointer(golden / "checkpoints" / "every_type", memory="64MiB")
    restored = c.restore(state)
    c.close()
    assert restored is not None and restored.step == 1
    for name, tensor in want["every"].items():
        assert state["every"][name].dtype == tensor.dtype, name
        assert torch.equal(state["every"][name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert torch.equal(state["tied"]["b"], want["tied"]["a"]) and state["scalar"].item() == 2.5
    assert state["tied"]["a"] is state["tied"]["b"] or torch.equal(state["tied"]["a"], state["tied"]["b"])


def test_a_sharded_checkpoint_is_whole_on_one_rank(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = golden / "checkpoints" / "sharded"
    listed = said(capsys, "checkpoint", "ls", folder, "--json")
    assert {c["step"] for c in listed["checkpoints"]} == {1, 2}
    out = golden / "exported"
    assert dispatch(["checkpoint", "export", str(folder), "--to", "torch", "--out", str(out)]) == 0
    assert out.exists()


def test_objects_of_a_bucket_are_a_checkpoint(golden: Path) -> None:
    from unbroken.checkpoint.catalogue.contents import verify_in
    from unbroken.testing.object_store import FakeS3

    want = expected(golden, "bucket")
    with FakeS3() as store:
        for key in want["objects"]:
            store.objects[key] = (golden / "bucket" / key).read_bytes()
            store.modified[key] = 0.0
        verify_in(store.storage("bucket/run"), want["name"])


def test_the_store_of_incidents(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = golden / "diagnosis" / "incidents.sqlite"
    again = said(
        capsys, "diagnose", golden / "diagnosis" / "train.log", "--store", store, "--json", codes=(20, 21)
    )
    assert again["reason"] == expected(golden, "diagnosis")["reason"]
    assert dispatch(["diagnose", "incidents", "--store", str(store)]) == 0
    assert expected(golden, "diagnosis")["incident"] in capsys.readouterr().out


def test_evaluations(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The finished one is told as it was; the killed one is told as not finished, with what it has."""
    finished = said(capsys, "eval", "status", golden / "evaluations" / "finished", "--json")
    killed = said(capsys, "eval", "status", golden / "evaluations" / "killed", "--json")
    assert finished != killed
    assert dispatch(["eval", "compare", *[str(golden / "evaluations" / "finished")] * 2]) == 0
    report = json.loads((golden / "evaluations" / "finished" / "report.json").read_text())
    got = {s["task"]: {m["name"]: m["value"] for m in s["metrics"]} for s in report["scores"]}
    assert got == expected(golden, "evaluations")["scores"]


def test_trace_and_telemetry(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = said(capsys, "trace", "stats", golden / "trace", "--json")
    assert sorted(stats) == expected(golden, "trace")["keys"]
    assert dispatch(["telemetry", "summary", str(golden / "telemetry")]) == 0
