"""torchft beside `benchmarks/restart.py --script plain`: two replica groups of one rank, of which the second is killed; torchrun starts it again.

Measured is when the killed group makes a step again. It takes the state of the other one, which stood still meanwhile and loses a step:
losses are not those of an undisturbed run, by its design.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch
import torch.nn as nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

folder, group = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
inner = torch.optim.SGD(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": inner}
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=20)), min_replica_size=1, replica_id=f"group-{group}", use_async_quorum=False,
    load_state_dict=lambda saved: [state[name].load_state_dict(saved[name]) for name in state],
    state_dict=lambda: {name: state[name].state_dict() for name in state},
)
ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
while True:
    optimizer.zero_grad()
    loss = ddp(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    if group == 1:
        with open(f"{folder}/steps", "a") as f:
            f.write(f"{time.time()} {os.getpid()} {manager.current_step()} {loss.item().hex()}\\n")
    time.sleep(0.1)
"""
UP_S = 30.0


def why_not() -> str:
    """Why it cannot be measured here; nothing where it can."""
    return "" if importlib.util.find_spec("torchft") else "torchft is not installed: pip install torchft"


def start(folder: Path, env: dict[str, str], log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
    """The lighthouse and two groups; the second one's launcher is the last. Raises TimeoutError."""
    (script := folder / "groups.py").write_text(SCRIPT)
    (program := folder / "lighthouse.py").write_text(
        "from torchft._torchft import lighthouse_main\nlighthouse_main()\n"
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def spawn(argv: list[str], **more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv, cwd=folder, env={**env, **more}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )  # fmt: skip

    lighthouse = spawn([
        sys.executable, str(program), "--min_replicas", "1", "--bind", f"127.0.0.1:{port}", "--join_timeout_ms", "1000",
        "--quorum_tick_ms", "100",
    ])  # fmt: skip
    deadline = time.monotonic() + UP_S
    while True:
        with socket.socket() as s:
            if not s.connect_ex(("127.0.0.1", port)):
                break
        if time.monotonic() > deadline or lighthouse.poll() is not None:
            lighthouse.kill()
            raise TimeoutError("torchft's lighthouse did not come up")
        time.sleep(0.05)
    groups = [
        spawn(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=100", str(script),
             str(folder), str(group)],
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}", REPLICA_GROUP_ID=str(group), NUM_REPLICA_GROUPS="2",
        )
        for group in (0, 1)
    ]  # fmt: skip
    return [lighthouse, *groups]
