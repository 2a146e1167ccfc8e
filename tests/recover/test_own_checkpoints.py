"""A script's own checkpoints: the newest whole one is found in the layouts of the usual trainers, and the script is told of it."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from unbroken.recover.supervise.attempt.own_checkpoints import add_argument, find_newest, is_whole

ROOT = Path(__file__).resolve().parents[2]


def torch_file(path: Path) -> None:
    """What torch.save writes: a zip archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("archive/data.pkl", b"x" * 5000)


def tensors(path: Path) -> None:
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.ones(1000, np.float32)}, path)


def hugging_face(folder: Path) -> None:
    tensors(folder / "model-00001-of-00002.safetensors")
    tensors(folder / "model-00002-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    torch_file(folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7}))


def cut(path: Path) -> None:
    """As a kill in the middle of writing leaves it."""
    path.write_bytes(path.read_bytes()[:-30])


def test_the_newest_whole_one_by_number(tmp_path: Path) -> None:
    for step in (500, 1500, 1000):
        hugging_face(tmp_path / "out" / f"checkpoint-{step}")
    assert find_newest("out/checkpoint-*", tmp_path, [], 0.0) == tmp_path / "out" / "checkpoint-1500"
    (tmp_path / "out" / "checkpoint-1500" / "trainer_state.json").unlink()
    assert find_newest("out/checkpoint-*", tmp_path, [], 0.0) == tmp_path / "out" / "checkpoint-1000"
    assert (
        find_newest(str(tmp_path / "out" / "checkpoint-5*"), Path("/"), [], 0.0)
        == tmp_path / "out/checkpoint-500"
    )
    assert find_newest("elsewhere/*", tmp_path, [], 0.0) is None
    assert find_newest("out/checkpoint-*", tmp_path, [], time.time() + 60) is None, "of another run"


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: cut(f / "model-00002-of-00002.safetensors"), lambda f: (f / "model-00001-of-00002.safetensors").unlink(),
        lambda f: cut(f / "optimizer.pt"), lambda f: cut(f / "trainer_state.json"), lambda f: (f / "trainer_state.json").unlink(),
        lambda f: (f / "rng_state_1.pth").touch(), lambda f: (f / "model.bin.tmp").write_text("x"),
    ],
)  # fmt: skip
def test_what_a_kill_cut_off_is_not_whole(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    hugging_face(folder := tmp_path / "checkpoint-5")
    assert is_whole(folder)
    damage(folder)
    assert not is_whole(folder)


def test_other_trainers(tmp_path: Path) -> None:
    torch_file(lightning := tmp_path / "epoch=1-step=200.ckpt")
    assert is_whole(lightning)
    cut(lightning)
    assert not is_whole(lightning)
    torch_file(tmp_path / "dcp" / "step-10" / "__0_0.distcp")
    assert not is_whole(tmp_path / "dcp" / "step-10")
    (tmp_path / "dcp" / "step-10" / ".metadata").write_bytes(b"x")
    assert is_whole(tmp_path / "dcp" / "step-10")
    for step in (100, 200):
        torch_file(tmp_path / "ds" / f"global_step{step}" / "mp_rank_00_model_states.pt")
        torch_file(tmp_path / "meg" / f"iter_{step:07d}" / "model_optim_rng.pt")
    (tmp_path / "ds" / "latest").write_text("global_step100")
    (tmp_path / "meg" / "latest_checkpointed_iteration.txt").write_text("200")
    assert find_newest("ds/global_step*", tmp_path, [], 0.0) == tmp_path / "ds" / "global_step100"
    assert find_newest("meg/iter_*", tmp_path, [], 0.0) == tmp_path / "meg" / "iter_0000200"
    assert not is_whole(tmp_path / "nothing") and not is_whole(tmp_path / "tmp-checkpoint-3")


def test_outputs_of_the_attempts_before(tmp_path: Path) -> None:
    for attempt, step in ((1, 30), (2, 20)):
        torch_file(tmp_path / str(attempt) / "output" / "deep" / f"step{step}.pt")
    outputs = [tmp_path / "1" / "output", tmp_path / "2" / "output"]
    assert find_newest("", tmp_path, outputs, 0.0) == outputs[0] / "deep" / "step30.pt"
    cut(outputs[0] / "deep" / "step30.pt")
    assert find_newest("", tmp_path, outputs, 0.0) == outputs[1] / "deep" / "step20.pt"


def test_how_the_script_is_told() -> None:
    command, path = ("train.py", "--lr", "1"), Path("/c/checkpoint-5")
    assert add_argument(command, "--resume_from_checkpoint {}", path) == (
        *command,
        "--resume_from_checkpoint",
        str(path),
    )
    assert add_argument(command, "--load={}", path) == (*command, "--load=/c/checkpoint-5")
    assert add_argument(command, "--resume", path) == (*command, "--resume", str(path))
    assert add_argument(command, "--resume", None) == add_argument(command, "", path) == command


SCRIPT = """
import json, os, sys, time
from pathlib import Path
from tqdm import tqdm

at = 0
if "--resume" in sys.argv:
    folder = Path(sys.argv[sys.argv.index("--resume") + 1])
    assert str(folder) == os.environ["UNBROKEN_RESUME_FROM"]
    at = json.loads((folder / "state.json").read_text())["step"]
print(f"begins after step {at}", flush=True)
steps = tqdm(range(at, 60), initial=at, total=60, mininterval=0, disable=os.environ["RANK"] != "0")
for step in steps:
    time.sleep(0.05)
    steps.set_postfix(loss=1 / (step + 1))
    if step % 5 == 4 and os.environ["RANK"] == "0":
        out = Path("out") / f"checkpoint-{step + 1}"
        out.mkdir(parents=True)
        (out / "state.json").write_text(json.dumps({"step": step + 1}))
    if step == 33 and at == 0 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    while step == 47 and 0 < at < 45:
        time.sleep(1)  # hangs
"""


@pytest.mark.slow
@pytest.mark.integration
def test_an_unmodified_script_is_killed_hangs_and_is_told_of_its_own_checkpoints(tmp_path: Path) -> None:
    """Nothing of ours in it: its bar is all that it shows, of rank 0 alone."""
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.startswith("UNBROKEN_")} | {
        "PYTHONPATH": str(ROOT / "src")
    }
    words = ["--nproc", "2", "--run-dir", "run", "--hang-after", "4s", "--suspect-after", "2s"]
    words += ["--resume-arg", "--resume {}", "--resume-from", "out/checkpoint-*", "--", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "unbroken", "run", *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    logs = sorted(
        (tmp_path / "run" / "attempts").glob("*/node-000/rank-0.log*")
    )  # older ones may be compressed
    texts = [gzip.decompress(f.read_bytes()).decode() if f.suffix == ".gz" else f.read_text() for f in logs]
    begun = [int(re.search(r"begins after step (\d+)", text)[1]) for text in texts]  # type: ignore[index]
    assert begun[0] == 0 and begun[1] in (30, 35, 40) and begun[2:] == [45], begun
    assert "hang" in done.stdout.lower() and "the script's own newest checkpoint, " in done.stdout
