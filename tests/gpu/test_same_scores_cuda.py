"""On a GPU too, `unbroken eval` gives the numbers of `lm_eval` run alone, bit for bit: for any number of workers and
whatever is killed. Several workers share the one GPU here, as they may: each joins by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("lm_eval", reason="lm-eval is not installed here")

from tests.evaluate.test_same_scores import alone, command, env, finish, lines, place, same  # noqa: E402
from unbroken.evaluate.result.journal import events  # noqa: E402

__all__ = ["env", "place"]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def reference(place: Path, env: dict[str, str]) -> dict[str, dict[str, Any]]:
    return alone(place, env, "cuda:0")


def test_one_worker(place: Path, env: dict[str, str], reference: dict[str, dict[str, Any]]) -> None:
    found = finish([*command(place, "one", 1), "--gpus", "1"], env)
    same(found, reference)
    where = {c["device"] for s in found["scores"] for c in s["conditions"]}
    assert where == {torch.cuda.get_device_name(0)}


def test_the_harness_batches_in_the_model_s_own_dtype(place: Path, env: dict[str, str]) -> None:
    """Eight sequences a batch, each task one block, as the harness makes its batches of a task that it runs alone."""
    theirs = alone(place, env, "cuda:0", "bfloat16", 8)
    cmd = command(
        place, "batched", 1, "--gpus", "1", "--dtype", "bfloat16", "--batch-size", "8", "--block", "10000"
    )
    found = finish(cmd, env)
    grouped = {n for n in theirs if n in {"tiny_group", "tiny_red", "tiny_blue"}}
    assert len(grouped) == 3, "these two leaves it asks in the same batches, so they are left out"
    found["scores"] = [s for s in found["scores"] if s["task"].rpartition(".")[2] not in grouped]
    found["groups"] = [g for g in found["groups"] if g["task"] not in grouped]
    same(found, {t: row for t, row in theirs.items() if t not in grouped})


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_join_and_one_that_is_killed(
    place: Path,
    env: dict[str, str],
    reference: dict[str, dict[str, Any]],
    workers: int,
    eventually: Callable[..., None],
) -> None:
    out = place / f"joined-{workers}"
    run = subprocess.Popen([*command(place, out.name, 1), "--engine", "none"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, env=env)  # fmt: skip
    with joined(out, workers, env) as them:
        eventually(lambda: lines(out) >= 3, within=120, every=0.005)
        os.kill(them[0].pid, signal.SIGKILL)
        stdout, stderr = run.communicate(timeout=200)
    assert run.returncode == 0, stderr[-3000:]
    same(dict(json.loads(stdout)), reference)
    took_part = {e["worker"] for e in events(out / "journal.jsonl") if e["event"] == "join"}
    assert len(took_part) == workers


@contextlib.contextmanager
def joined(out: Path, workers: int, env: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    cmd = [sys.executable, "-m", "unbroken", "eval", "join", str(out), "--gpus", "0", "--wait", "60"]
    them = [subprocess.Popen(cmd, env=env, stdout=subprocess.DEVNULL) for _ in range(workers)]
    try:
        yield them
    finally:
        for p in them:
            p.kill()
            p.wait()
