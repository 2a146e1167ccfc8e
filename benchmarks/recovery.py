"""How long until training goes on after a fault: `unbroken run` and torchrun on the same hosts, with the same script and faults.

    python benchmarks/recovery.py [--rows agent store ...] [--out benchmarks/results/recovery.json]     # as root

Three hosts and a spare are network namespaces of this machine (tests/support/net_hosts.py), each with one rank: a small step and an
all-reduce over gloo with a time-out of 20 s. torchrun has the three hosts (`--nnodes 2:3`, c10d rendezvous on the first, three
restarts): it knows no spares. `unbroken run` has them and the spare, its supervisor on a host of its own, `--hang-after 20s`, else
as it comes. The time is from the fault to the first step that a rank 0 made after it in a new attempt; "never" is not within 120 s.

rows: worker (kill -9 of a rank), stopped (SIGSTOP of a rank), agent (kill -9 of the agent of a host), cut (its link goes dead
without a reset), host (it is gone), store (the host of rank 0 and of torchrun's store is gone).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from tests.support.net_hosts import NetHosts, net_hosts, why_not

from unbroken.cluster.holding.processes import end, marked
from unbroken.progress import RunDir, read_spec

ROWS = ("worker", "stopped", "agent", "cut", "host", "store")
NEVER_S, START_S = 120.0, 180.0
SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import unbroken

run = unbroken.attach(total_steps=100000)
if out := os.environ.get("UNBROKEN_OUTPUT"):  # what a script saves there no older process can overwrite
    open(f"{out}/rank-{os.environ['RANK']}", "w").close()
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
one, name = torch.ones(1000), os.environ.get("UNBROKEN_ATTEMPT") or os.environ["TORCHELASTIC_RESTART_COUNT"]
for step in range(1, 100000):
    time.sleep(0.1)
    dist.all_reduce(one)
    run.step(step, loss=1.0, tokens=1)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "a") as f:
            f.write(f"{time.time()} {name}-{os.getpid()} {step}\\n")
"""


class Contender:
    """One way of running the script on hosts."""

    def __init__(self, hosts: NetHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        folder.mkdir()
        self.script, self.steps = folder / "train.py", folder / "steps"
        self.script.write_text(SCRIPT)
        self.children: list[subprocess.Popen[bytes]] = []

    def spawn(self, host: int, command: list[str]) -> None:
        with open(self.folder / f"h{host}.log", "ab") as log:
            self.children.append(
                subprocess.Popen(
                    self.hosts.argv(host, command), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}, start_new_session=True,
                )
            )  # fmt: skip

    def lines(self) -> list[list[str]]:
        return [x.split() for x in self.steps.read_text().splitlines()] if self.steps.exists() else []

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + START_S
        while len(self.lines()) < count:
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(p.read_text()[-3000:] for p in self.folder.glob("*.log")))
            time.sleep(0.1)

    def measure(self, row: str) -> float | None:
        """Seconds until training goes on after the fault; None for never."""
        self.start()
        self.wait_for_steps(20)
        before = {x[1] for x in self.lines()}
        at = time.time()
        self.harm(row)
        while time.time() < at + NEVER_S:
            if new := [x for x in self.lines() if len(x) == 3 and x[1] not in before]:
                return float(new[0][0]) - at
            time.sleep(0.1)
        return None

    def harm(self, row: str) -> None:
        host = 1 if row == "store" else 2
        match row:
            case "worker" | "stopped":
                os.kill(self.find(host, "rank"), signal.SIGKILL if row == "worker" else signal.SIGSTOP)
            case "agent":
                os.kill(self.find(host, "agent"), signal.SIGKILL)
            case "cut":
                self.hosts.cut(host)
            case _:
                self.hosts.crash(host)

    def start(self) -> None:
        raise NotImplementedError

    def find(self, host: int, role: str) -> int:
        raise NotImplementedError

    def end(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait(20)


class Torchrun(Contender):
    def start(self) -> None:
        for i in (1, 2, 3):
            self.spawn(i, [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=3",
                "--rdzv-backend=c10d", f"--rdzv-endpoint={self.hosts.address(1)}:29400", "--rdzv-id=x",
                "--rdzv-conf=join_timeout=60,last_call_timeout=10", f"--local-addr={self.hosts.address(i)}",
                str(self.script), str(self.steps),
            ])  # fmt: skip

    def find(self, host: int, role: str) -> int:
        for pid in self.hosts.pids(host):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            is_agent = b"torch.distributed.run" in words
            if (
                b"train.py" in b" ".join(words)
                and is_agent == (role == "agent")
                and words[0].endswith(b"python")
            ):
                return pid
        raise LookupError(f"no {role} on host {host}")


class Unbroken(Contender):
    def start(self) -> None:
        self.spawn(0, [
            sys.executable, "-m", "unbroken", "run", "--run-dir", str(self.folder / "run"), "--nodes", "3", "--spares", "1",
            "--record", "own-disk", "--hang-after", "20s", "--cluster", self.hosts.cluster([1, 2, 3, 4]), "--",
            str(self.script), str(self.steps),
        ])  # fmt: skip

    @property
    def run_id(self) -> str:
        return read_spec(RunDir(self.folder / "run").spec).run_id

    def find(self, host: int, role: str) -> int:
        return next(p.pid for p in marked(self.run_id, node=f"h{host}") if p.role == role)

    def end(self) -> None:
        super().end()
        end(lambda: marked(self.run_id))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    found: dict[str, dict[str, float | None]] = {}
    for row in args.rows:
        for kind in (Unbroken, Torchrun):
            with tempfile.TemporaryDirectory() as folder, net_hosts(Path(folder) / "hosts", 5) as hosts:
                for i in (1, 2, 3, 4) if kind is Unbroken else ():
                    hosts.serve_ssh(i)
                if kind is Unbroken:
                    hosts.wait_for_ssh([1, 2, 3, 4])
                contender = kind(hosts, Path(folder) / "run")
                try:
                    seconds = contender.measure(row)
                finally:
                    contender.end()
            found.setdefault(row, {})[kind.__name__.lower()] = seconds
            print(
                f"{row}: {kind.__name__.lower()} {f'{seconds:.1f} s' if seconds is not None else 'never'}",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps({"machine": describe_machine(), "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
