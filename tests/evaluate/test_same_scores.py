"""`unbroken eval` gives the numbers of `lm_eval` run alone, bit for bit: for any number of workers, on both engines,
whatever is killed in the middle. Real tasks of the harness, a real (tiny) transformers model, the real command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (make install-eval)")
pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_tasks import NAMES, write_tiny_tasks
from unbroken.evaluate.result.journal import events

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]
SAMPLED = {
    "tiny_vote"
}  # lm_eval draws from one stream over the whole run, so its answers depend on their order
WANTED = [n for n in NAMES if n not in SAMPLED]

REFERENCE = """
import json, sys
from lm_eval.tasks import TaskManager
import lm_eval
from unbroken.evaluate.harness.lm_eval import one_process
model, tasks, names, device, dtype, batch = sys.argv[1], sys.argv[2], sys.argv[3].split(","), *sys.argv[4:]
manager = TaskManager(include_path=tasks, include_defaults=False)
rows = {}
for some in [names] if batch == "1" else [[n] for n in names]:  # it batches over its tasks: then each is asked alone
    with one_process():
        found = lm_eval.simple_evaluate("hf", {"pretrained": model, "dtype": dtype}, tasks=some, task_manager=manager,
                                        bootstrap_iters=20, batch_size=int(batch), device=device)
    rows |= {**found["results"], **found.get("groups", {})}
print(json.dumps({t: {k: v for k, v in r.items() if "," in k} for t, r in rows.items()}))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same")
    write_tiny_tasks(folder / "tasks", documents=22)
    write_tiny_model(folder / "model")
    rows = [
        f'[[task]]\nname = "{n}"\n[task.options]\ninclude = "tasks"\nbootstrap_iters = 20\n' for n in WANTED
    ]
    (folder / "suite.toml").write_text('[suite]\nname = "tiny"\n' + "\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def env(place: Path) -> dict[str, str]:
    # Blocks take long enough to be killed in: everybody's torch uses one thread, all of them share two cores.
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "hf"), "HF_DATASETS_CACHE": str(place / "hf"),
            "XDG_STATE_HOME": str(place / "state"), "XDG_CACHE_HOME": str(place / "cache"), "OMP_NUM_THREADS": "1"}  # fmt: skip


@pytest.fixture(scope="module")
def reference(place: Path, env: dict[str, str]) -> dict[str, dict[str, Any]]:
    return alone(place, env)


def alone(
    place: Path, env: dict[str, str], device: str = "cpu", dtype: str = "float32", batch: int = 1
) -> dict[str, dict[str, Any]]:
    """`lm_eval` alone, in one process."""
    out = subprocess.run([sys.executable, "-c", REFERENCE, str(place / "model"), str(place / "tasks"), ",".join(WANTED),
                          device, dtype, str(batch)], capture_output=True, text=True, env=env, check=False)  # fmt: skip
    assert out.returncode == 0, out.stderr[-3000:]
    return dict(json.loads(out.stdout.strip().splitlines()[-1]))


def command(place: Path, out: str, workers: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "unbroken", "eval", "run", str(place / "suite.toml"), "-m", str(place / "model"), "-o", str(place / out),
            "--workers", str(workers), "--batch-size", "1", "--block", "4", "--dtype", "float32", "--exact", "--json", "--priors", "none", *more]  # fmt: skip


def finish(cmd: list[str], env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(cmd, capture_output=True, text=True, env=env, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def same(found: dict[str, Any], reference: dict[str, dict[str, Any]]) -> None:
    got: dict[str, dict[str, str]] = {}
    for s in [*found["scores"], *found["groups"]]:
        assert s["scored"] == s["samples"]
        name = s["task"].rpartition(".")[2]  # a group's leaf: GROUP.LEAF
        for m in s["metrics"]:
            metric, _, rest = m["name"].partition(",")
            got.setdefault(name, {})[m["name"]] = bits(m["value"])
            got[name][f"{metric}_stderr,{rest}"] = bits(m["stderr"])
    wanted = {t: {k: bits(v) for k, v in row.items()} for t, row in reference.items()}
    assert got == wanted


def bits(value: Any) -> str:
    return "N/A" if value is None or isinstance(value, str) else float(value).hex()


@pytest.mark.parametrize(
    "workers", [3, *(pytest.param(workers, marks=pytest.mark.soak) for workers in (1, 2, 7))]
)
def test_any_number_of_workers(
    place: Path, env: dict[str, str], reference: dict[str, dict[str, Any]], workers: int
) -> None:
    same(finish(command(place, f"w{workers}", workers), env), reference)


@pytest.mark.parametrize("victim", [pytest.param("worker", marks=pytest.mark.soak), "coordinator", "node"])
def test_kill_9_in_the_middle(
    place: Path,
    env: dict[str, str],
    reference: dict[str, dict[str, Any]],
    victim: str,
    eventually: Callable[..., None],
) -> None:
    out = place / f"killed-{victim}"
    cmd = command(place, out.name, 2, "--cache", "always")
    process = subprocess.Popen(
        cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    eventually(lambda: lines(out) >= 3, within=200, every=0.005)
    joined = [e["pid"] for e in events(out / "journal.jsonl") if e["event"] == "join"]
    if victim == "worker":
        os.kill(joined[-1], signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=400)
        assert process.returncode == 0, stderr[-3000:]
        assert any(
            (e["event"] == "gone" and e["worker"] == "w1") or e["event"] == "ended"
            for e in events(out / "journal.jsonl")
        )
        same(dict(json.loads(stdout)), reference)
        return
    if victim == "node":  # everything on it at once, the copy's watcher as well
        pids = [*descendants(process.pid), *joined]
        for pid in [process.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait(20)
    saved = lines(out)
    found = finish(cmd, env)
    same(found, reference)
    asked = sum(e["blocks"] - e["reused"] for e in events(out / "journal.jsonl") if e["event"] == "task")
    first = sum(
        e["blocks"] for e in events(out / "journal.jsonl") if e["event"] == "task" and e["reused"] == 0
    )
    assert saved >= 3 and asked >= first - saved


def lines(out: Path) -> int:
    return sum(p.read_bytes().count(b"\n") for p in (out / "answers").rglob("*.jsonl"))


def descendants(pid: int) -> Iterator[int]:
    import psutil

    for p in psutil.Process(pid).children(recursive=True):
        yield p.pid


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed (make install-all)")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    # The head has no CPUs for actors: workers run on the two nodes that can be killed.
    cluster = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 * 2**20},
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.soak
def test_ray_gives_the_same(
    place: Path, env: dict[str, str], reference: dict[str, dict[str, Any]], ray_cluster: Any
) -> None:
    same(
        finish(command(place, "ray", 2, "--engine", "ray", "--ray-address", ray_cluster.address), env),
        reference,
    )


def test_a_ray_node_dies_in_the_middle(
    place: Path,
    env: dict[str, str],
    reference: dict[str, dict[str, Any]],
    ray_cluster: Any,
    eventually: Callable[..., None],
) -> None:
    out = place / "ray-killed"
    cmd = command(place, out.name, 2, "--engine", "ray", "--ray-address", ray_cluster.address)
    process = subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    eventually(lambda: lines(out) >= 3, within=200, every=0.005)
    node = next(n for n in ray_cluster.list_all_nodes() if not n.head)
    ray_cluster.remove_node(node, allow_graceful=False)
    stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stderr[-3000:]
    same(dict(json.loads(stdout)), reference)


def test_a_ray_cluster_that_does_not_answer(place: Path, env: dict[str, str]) -> None:
    pytest.importorskip("ray")
    began = time.monotonic()
    done = subprocess.run(command(place, "noray", 1, "--engine", "ray", "--ray-address", "127.0.0.1:1"), capture_output=True, text=True,
                          env={**env, "RAY_gcs_rpc_server_connect_timeout_s": "2"}, check=False, timeout=200)  # fmt: skip
    assert done.returncode == 50
    assert "does not answer" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - began < 180
