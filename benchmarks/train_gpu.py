"""The reference trainer on this machine's GPUs: a killed and resumed run must equal the undisturbed one bit for bit.

python3 benchmarks/train_gpu.py [-o RESULT.json]      (about two minutes; from a source checkout, a plain PyTorch image)

One rank on one GPU in float32 and bfloat16; two ranks that share a GPU over gloo; with more GPUs two and four ranks
over NCCL, gradients reduced during the backward pass. Each is run undisturbed, then killed with -9 at a random step
and started again. Also the speed of the 100m preset. Exits 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "src"), str(REPO)]

from tests.support.fork_server import ForkServer, Training  # noqa: E402

STEPS = 60
BASE = [
    "--steps",
    str(STEPS),
    "--preset",
    "small",
    "--snapshot-every",
    "5",
    "--persist-every",
    "10",
    "--log-every",
    "10",
]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("-o", "--out", type=Path, default=REPO / "benchmarks" / "results" / "train_gpu.json")
    args = p.parse_args()
    names = gpus()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "gpus": names,
        "python": platform.python_version(),
        "arms": {},
    }
    if not names:
        print("no GPU here: only the contenders on the processor would run; see pytest tests/train")
        return 1
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    contenders: dict[str, tuple[int, list[str], dict[str, str]]] = {
        "1 rank, float32": (1, [], one),
        "1 rank, bfloat16, dropout": (1, ["--dtype", "bfloat16", "--dropout", "0.1"], one),
        "2 ranks, gloo, one GPU": (2, [], one),
    }
    for n in (2, 4):
        if len(names) >= n:
            contenders[f"{n} ranks, NCCL, overlapped"] = (n, ["--dtype", "bfloat16", "--overlap"], {})
    fork_server = ForkServer()
    with tempfile.TemporaryDirectory() as folder:
        for name, (ranks, more, env) in contenders.items():
            result["arms"][name] = contender(
                fork_server, Path(folder) / name.replace(" ", "-"), ranks, more, env
            )
            print(name, json.dumps(result["arms"][name]), flush=True)
        result["100m_tokens_per_s"] = speed(fork_server, Path(folder) / "speed", one)
    fork_server.close()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if all(a["identical"] for a in result["arms"].values()) else 1


def contender(
    fork_server: ForkServer, folder: Path, ranks: int, more: list[str], env: dict[str, str]
) -> dict[str, Any]:
    """One layout, undisturbed and killed: whether all is equal, and how long it took."""
    folder.mkdir()
    began = time.monotonic()
    undisturbed = Training(fork_server, folder / "a", ranks, [*BASE, *more], env)
    undisturbed.start()
    undisturbed.finish()
    killed = Training(
        fork_server, folder / "b", ranks, [*BASE, *more, "--checkpoints", str(folder / "c")], env
    )
    at = random.Random(ranks).randint(20, 45)
    killed.start()
    killed.wait_for_step(at)
    for r in range(
        ranks
    ):  # NCCL notices a dead peer only by its time-out; without a supervisor all are ended here
        killed.kill(r)
    killed.codes()
    killed.start()
    killed.finish()
    differences = [
        a.difference(b)
        for a, b in zip(undisturbed.all_step_digests(), killed.all_step_digests(), strict=True)
    ]
    banner = [x for x in killed.log(0).read_text().splitlines() if x.startswith(("training ", "resumed "))]
    return {
        "identical": not any(differences),
        "differences": [d for d in differences if d],
        "killed_after": at,
        "executions": [w.executions for w in killed.all_step_digests()],
        "said": banner,
        "seconds": round(time.monotonic() - began, 1),
    }


def speed(fork_server: ForkServer, folder: Path, env: dict[str, str]) -> float:
    """Tokens a second of the 100m preset on one GPU, median of the last steps."""
    t = Training(fork_server, folder, 1, ["--preset", "100m", "--steps", "15"], env)
    t.start()
    t.finish()
    rates = [
        float(x.split()[-2].replace(",", ""))
        for x in t.log(0).read_text().splitlines()
        if x.startswith("step ")
    ]
    return sorted(rates[5:])[len(rates[5:]) // 2]


def gpus() -> list[str]:
    """The names of the GPUs, asked in another process: a CUDA context does not survive a fork."""
    code = "import torch, json; print(json.dumps([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]))"
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names: list[str] = json.loads(p.stdout.splitlines()[-1])
    return names


if __name__ == "__main__":
    sys.exit(main())
