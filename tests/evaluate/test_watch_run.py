"""`unbroken eval watch` on real committed checkpoints: exported, loaded by transformers, scored, curves over steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(400)]

INFER = 'def prompt(row):\n    return {"context": row["text"], "choices": ["amber", "birch"]}\n'
SCORE = "def score(row, output):\n    return int(output[0][0] > output[1][0])\n"


def commit(root: Path, step: int, state: dict[str, Any]) -> None:
    """A checkpoint of one rank, as a keeper writes it."""
    from unbroken.checkpoint.capture import direct
    from unbroken.checkpoint.format.manifest import Sharding
    from unbroken.checkpoint.format.position import Position
    from unbroken.checkpoint.storage.posix import PosixStorage

    storage = PosixStorage(root)
    records = {}
    for name, t in state.items():
        box = (tuple(0 for _ in t.shape), tuple(t.shape))
        records[f"model.{name}"] = (
            str(t.dtype).removeprefix("torch."),
            Sharding(tuple(t.shape), (), (), (), (box,)),
        )
    values = {"model": {n: {"$": "tensor", "name": f"model.{n}"} for n in state}}
    stamp = direct.Stamp("run", 1, step, 0, 1, Position(0, ((0, step),)))
    part = direct.write_pieces(
        storage, records, lambda name: state[name.removeprefix("model.")], values, stamp
    )
    direct.commit(storage, [part])


def test_every_checkpoint_is_scored(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from tests.support.tiny_model import write_tiny_model

    like = write_tiny_model(tmp_path / "like")
    task = tmp_path / "task"
    task.mkdir()
    (task / "infer.py").write_text(INFER)
    (task / "score.py").write_text(SCORE)
    (task / "data.jsonl").write_text(
        "".join(json.dumps({"text": f"which word {i} "}) + "\n" for i in range(20))
    )
    (tmp_path / "s.toml").write_text(
        '[suite]\nname = "s"\n[[task]]\nname = "words"\nharness = "plain"\ntarget = "task"\n'
    )
    for step in (10, 20):
        weights = load_file(like / "model.safetensors")
        commit(
            tmp_path / "run" / "checkpoints",
            step,
            {
                n: t + 0.05 * step * torch.randn(t.shape, generator=torch.Generator().manual_seed(step))
                for n, t in weights.items()
            },
        )
    env = {
        **os.environ,
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    cmd = [sys.executable, "-m", "unbroken", "eval", "watch", str(tmp_path / "run"), "--suite", str(tmp_path / "s.toml"), "--like", str(like),
           "--once", "--workers", "1", "--dtype", "float32", "--json"]  # fmt: skip
    done = subprocess.run(cmd, capture_output=True, text=True, env=env, check=False, timeout=380)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert [p["step"] for p in found["points"]] == [10, 20]
    assert all(not p["failed"] and p["scores"][0]["scored"] == 20 for p in found["points"]), found
    out = tmp_path / "run" / "evaluations" / "s"
    assert len({json.loads(p.read_text())["checkpoint"] for p in out.glob("step-*/report.json")}) == 2
    assert (out / "curves.html").exists() and not list((out / "models").iterdir())
    assert not list((tmp_path / "run" / "checkpoints").rglob("lease-*"))
