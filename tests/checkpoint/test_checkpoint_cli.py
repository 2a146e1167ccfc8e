"""`unbroken checkpoint` as a user types it: output, JSON, exit codes, mistakes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import flip_bit, save_small
from unbroken.checkpoint.catalogue import sizing
from unbroken.cli.main import dispatch
from unbroken.errors import UsageError
from unbroken.testing.object_store import FakeS3


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `unbroken checkpoint ARGS`; gives exit code, output and errors."""

    def call(*args: object) -> tuple[int, str, str]:
        code = dispatch(["checkpoint", *map(str, args)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run directory with three good checkpoints, a damaged one, and one that was never finished."""
    root = tmp_path / "run" / "checkpoints"
    for step in (100, 200, 300, 400):
        save_small(root, step)
    save_small(root, 500, commit=False)
    flip_bit(root / "step-00000400.a0001" / "rank-00001.safetensors", -1)
    return root


def test_ls(run: Any, folder: Path) -> None:
    for place in (folder, folder.parent, f"file://{folder}"):
        code, out, _ = run("ls", place)
        assert code == 0
        assert "4 of 5 committed" in out
        assert out.index("step-00000500") < out.index("step-00000400")
        assert "incomplete: no commit marker (2 ranks had written)" in out
    code, out, _ = run("ls", folder, "--json")
    told = json.loads(out)["checkpoints"]
    assert [c["step"] for c in told] == [500, 400, 300, 200, 100]
    assert (told[1]["status"], told[1]["world_size"], told[1]["rung"], told[1]["samples"]) == (
        "committed",
        2,
        "disk",
        400,
    )
    code, out, _ = run("ls", folder / "step-00000100.a0001", "--json")
    assert [c["step"] for c in json.loads(out)["checkpoints"]] == [100]


def test_export_says_which_newer_ones_it_passes_over(run: Any, folder: Path, tmp_path: Path) -> None:
    data = folder / "step-00000400.a0001" / "rank-00000.safetensors"
    os.truncate(data, data.stat().st_size - 1)
    code, out, err = run("export", folder, "--to", "torch", "--out", tmp_path / "a.pt")
    assert code == 0
    assert "passed over step-00000400.a0001" in out and err == ""
    code, out, _ = run("export", folder, "--to", "torch", "--out", tmp_path / "b.pt", "--json")
    told = json.loads(out)
    assert told["checkpoint"] == "step-00000300.a0001"
    assert [n.partition(":")[0] for n in told["notes"]] == ["passed over step-00000400.a0001"]
    for step in (100, 200, 300):
        data = folder / f"step-{step:08d}.a0001" / "rank-00000.safetensors"
        os.truncate(data, data.stat().st_size - 1)
    code, _, err = run("export", folder, "--to", "torch", "--out", tmp_path / "c.pt")
    assert code == 30 and "no checkpoint verifies: step-00000400.a0001" in err


def test_export_of_a_damaged_one_says_what_to_do(run: Any, folder: Path, tmp_path: Path) -> None:
    flip_bit(folder / "step-00000400.a0001" / "rank-00000.safetensors", -1)
    code, _, err = run("export", folder, "--to", "torch", "--out", tmp_path / "a.pt")
    assert code == 31 and "export an older one by its name" in err


def test_verify(run: Any, folder: Path) -> None:
    code, out, _ = run("verify", folder)
    assert code == 31
    assert "DAMAGED" in out
    assert "rank-00001.safetensors: bytes 0 and on differ" in out
    code, out, _ = run("verify", folder, "--all", "--json")
    told = json.loads(out)
    assert (code, told["ok"], [c["ok"] for c in told["checkpoints"]]) == (
        31,
        False,
        [False, True, True, True],
    )
    assert run("verify", folder / "step-00000300.a0001")[0] == 0
    assert run("verify", folder, "--quick")[0] == 0
    assert run("verify", folder / "step-00000500.a0001")[0] == 31


def test_prune_and_keep(run: Any, folder: Path) -> None:
    assert run("keep", folder / "step-00000100.a0001", "--holder", "eval", "--for", "2h")[0] == 0
    code, out, _ = run("prune", folder, "--keep-last", 1, "--dry-run")
    assert "would go step-00000200.a0001" in out
    assert (folder / "step-00000200.a0001").exists()
    code, out, _ = run("prune", folder, "--keep-last", 1, "--json")
    told = json.loads(out)
    assert code == 31, "a damaged one was found"
    assert list(told["removed"]) == ["step-00000200.a0001"]
    assert told["kept"]["step-00000100.a0001"] == "held by eval"
    assert told["kept"]["step-00000300.a0001"] == "one of the last 1"
    assert run("keep", folder / "step-00000100.a0001", "--holder", "eval", "--release")[0] == 0
    assert list(json.loads(run("prune", folder, "--keep-last", 1, "--json")[1])["removed"]) == [
        "step-00000100.a0001"
    ]


def test_out_and_in_again(run: Any, folder: Path, tmp_path: Path) -> None:
    one = folder / "step-00000300.a0001"
    for form, out in (("torch", "x.pt"), ("dcp", "dcp"), ("huggingface", "hf")):
        code, text, err = run("export", one, "--to", form, "--out", tmp_path / out, "--json")
        assert (code, json.loads(text)["tensors"]) == (0, 2), err
        code, text, err = run(
            "import", tmp_path / out, "--to", tmp_path / f"new-{form}", "--step", 7, "--json"
        )
        assert (code, json.loads(text)["name"]) == (0, "step-00000007.a0000"), err
        assert run("verify", tmp_path / f"new-{form}")[0] == 0
    code, out, _ = run(
        "import", tmp_path / "x.pt", "--to", tmp_path / "named", "--step", 8, "--rename", "w=model.w"
    )
    assert code == 0
    assert "model: 1 tensors" in out


def test_copy_to_a_bucket_and_back(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    with FakeS3() as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        one, bucket = folder / "step-00000300.a0001", "s3://bucket/some/run"
        assert json.loads(run("copy", one, bucket, "--json")[1])["committed"]
        assert json.loads(run("copy", one, bucket, "--json")[1])["sent_bytes"] == 0
        told = json.loads(run("ls", bucket, "--json")[1])["checkpoints"]
        assert [(c["step"], c["rung"], c["status"]) for c in told] == [(300, "remote", "committed")]
        assert run("verify", f"{bucket}/step-00000300.a0001")[0] == 0
        assert run("copy", bucket, tmp_path / "back")[0] == 0
        assert run("verify", tmp_path / "back")[0] == 0
        assert run("export", bucket, "--to", "torch", "--out", tmp_path / "x.pt")[0] == 0
        assert torch.load(tmp_path / "x.pt", weights_only=True)["lr"] == 0.1


MISTAKES: list[tuple[list[str], int, str]] = [
    (["ls", "nowhere"], 3, "no such folder"),
    (["ls", "file"], 3, "no such folder"),
    (["verify", "empty"], 3, "no committed checkpoint"),
    (["export", "run", "--to", "hugginface", "--out", "x"], 2, "Did you mean 'huggingface'?"),
    (["export", "run", "--to", "torch", "--out", "file"], 2, "exists"),
    (
        ["export", "run/checkpoints/step-00000009.a0001", "--to", "torch", "--out", "x"],
        30,
        "there is no checkpoint 'step-00000009.a0001'",
    ),
    (["ls", "run/checkpoints/step-00000009.a0001"], 30, "there is no checkpoint"),
    (["verify", "run/checkpoints/step-00000009.a0001"], 30, "there is no checkpoint"),
    (["import", "file", "--to", "new"], 3, "torch cannot read it"),
    (["import", "nowhere", "--to", "new"], 3, "no such file"),
    (["import", "file", "--to", "new", "--rename", "x"], 2, "--rename module=model"),
    (["prune", "run", "--keep-last", "0"], 2, "Keep at least the last"),
    (["prune", "run/checkpoints/step-00000300.a0001"], 2, "Name the folder"),
    (["keep", "run", "--holder", "a b"], 2, "cannot hold a pin"),
    (["keep", "run", "--holder", "a", "--for", "soon"], 2, "not a duration"),
    (["ls", "gs://x"], 2, "no address"),
    (["size"], 2, "give a number of parameters"),
    (["size", "7Q"], 2, "7e9, 7B or 350M"),
    (["size", "7B", "--optimizer", "x"], 2, "adamw"),
    (["ls", "renamed"], 3, "under another name"),
]


@pytest.mark.parametrize("args", [" ".join(m[0]) for m in MISTAKES])
def test_mistakes_are_one_paragraph(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: Any, args: str
) -> None:
    typed, code, text = next(m for m in MISTAKES if " ".join(m[0]) == args)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    if "renamed" in args:
        (folder / "step-00000300.a0001").rename(tmp_path / "renamed")
    got, out, err = run(*typed)
    assert (got, text in " ".join(err.split())) == (code, True), err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    if "export" not in typed:
        got, out, err = run(*typed, "--json")
        assert json.loads(out)["error"]["exit_code"] == code == got


def test_size(run: Any, folder: Path) -> None:
    out = run("size", "7B", "--ranks", 16, "--ranks-per-node", 8, "--peer", "--json")[1]
    told = json.loads(out)
    assert told["state_bytes"] == 84 * 10**9
    assert told["rank_bytes"] == 5_250_000_000
    assert told["node_host_bytes"] == 5_250_000_000 * 8 * 3 * 2
    assert told["folder_bytes"] == 84 * 10**9 * 4
    out = run("size", "--like", folder, "--ranks", 2, "--replicated", "--json")[1]
    assert json.loads(out)["checkpoint_bytes"] == 2 * 1208
    assert "host memory" in run("size", "350M")[1]


def test_state_of_known_recipes() -> None:
    assert sizing.state_bytes(10, dtype="bfloat16", optimizer="adamw", master=True) == 10 * (2 + 4 + 8)
    assert sizing.state_bytes(10, dtype="float32", optimizer="sgd") == 40
    with pytest.raises(UsageError):
        sizing.SizingPlan(1, 0, 1)
