"""How long until training goes on after a fault: `unbroken run`, torchrun and others on the same hosts, with the same script.

    python benchmarks/recovery.py [--rows agent store ...] [--contenders unbroken torchrun nvrx] [--out RESULT.json]     # as root

Three hosts and a spare are network namespaces of this machine (tests/support/net_hosts.py), each with one rank: a small step and an
all-reduce over gloo with a time-out of 20 s. torchrun has the three hosts (`--nnodes 2:3`, c10d rendezvous on the first, three
restarts): it knows no spares. `nvrx` is NVIDIA's ft_launcher with the same options, where it is installed (`pip install
nvidia-resiliency-ext`), its heartbeats set to ten minutes: the script sends none. `unbroken run` has them and the spare, its
supervisor on a host of its own, `--hang-after 20s`, else as it comes. The fault comes at step 20, before there are warm processes: `warm`
is the same run with `--warm-after 1s`, struck once all four hosts have theirs. The time is from the fault to the first step that a rank 0 made
after it in a new attempt; "never" is not within 90 s, or once all of its launchers have ended; `goes_on` says whether steps were made to
the end without a new attempt. The result file is written after each figure, and what it has of others stays.

    worker      kill -9 of a rank
    stopped     SIGSTOP of a rank
    long        the same, with the time-out of torch's collectives as it comes (30 min)
    agent       kill -9 of the agent of a host
    cut         the link of a host goes dead without a reset
    host        a host is gone
    fixed       the same, where torchrun was given `--nnodes 3`
    store       the host of rank 0 and of torchrun's store is gone
    clock       one host's clock is a minute behind (libfaketime): from the start to the first step of all three
    supervisor  the supervisor's host is gone, and the command is given on another one at once: the longest time without a step
                (torchrun and ft_launcher have no such host)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from tests.support.net_hosts import NetHosts, net_hosts, why_not

from unbroken.cluster.holding.processes import end, marked
from unbroken.progress import RunDir, read_journal, read_spec, read_terms

ROWS = ("worker", "stopped", "long", "agent", "cut", "host", "fixed", "store", "clock", "supervisor")
NEVER_S, START_S, RECENT_S = 90.0, 300.0, 5.0
HOSTS = 6
"""The supervisor's, three and a spare, and one for the next supervisor."""
BEHIND = {"FAKETIME": "-60s", "DONT_FAKE_MONOTONIC": "1"}
SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import unbroken

run = unbroken.attach(total_steps=100000)
if out := os.environ.get("UNBROKEN_OUTPUT"):  # what a script saves there no older process can overwrite
    open(f"{out}/rank-{os.environ['RANK']}", "w").close()
dist.init_process_group("gloo", timeout=timedelta(seconds=int(sys.argv[2])))
one, name = torch.ones(1000), os.environ.get("UNBROKEN_ATTEMPT") or os.environ["TORCHELASTIC_RESTART_COUNT"]
for step in range(1, 100000):
    time.sleep(0.1)
    dist.all_reduce(one)
    run.step(step, loss=1.0, tokens=1)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "a") as f:
            f.write(f"{time.clock_gettime(time.CLOCK_REALTIME)} {name}-{os.getpid()} {step} {dist.get_world_size()}\\n")
"""


class Contender:
    """One way of running the script on hosts."""

    name = ""

    def __init__(self, hosts: NetHosts, folder: Path, row: str) -> None:
        self.hosts, self.folder, self.row = hosts, folder, row
        folder.mkdir()
        self.script, self.steps = folder / "train.py", folder / "steps"
        self.script.write_text(SCRIPT)
        self.children: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def why_not() -> str:
        """Why it cannot be measured here; nothing where it can."""
        return ""

    def set_clock(self, host: int) -> dict[str, str]:
        """What makes the clock of the third host a minute late, where the row is about that."""
        return BEHIND | {"LD_PRELOAD": find_faketime()} if self.row == "clock" and host == 3 else {}

    @property
    def words(self) -> list[str]:
        """Script and arguments."""
        return [str(self.script), str(self.steps), "1800" if self.row == "long" else "20"]

    def spawn(self, host: int, command: list[str], **env: str) -> None:
        with open(self.folder / f"h{host}.log", "ab") as log:
            self.children.append(
                subprocess.Popen(
                    self.hosts.argv(host, command), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **env}, start_new_session=True,
                )
            )  # fmt: skip

    def lines(self) -> list[list[str]]:
        lines = self.steps.read_text().splitlines() if self.steps.exists() else []
        return [words for x in lines if len(words := x.split()) == 4]

    def wait(self, within_s: float, found: Callable[[], Any]) -> Any:
        """What is found within the time; None where nothing is."""
        deadline = time.monotonic() + within_s
        while not (value := found()):
            ended = all(child.poll() is not None for child in self.children)
            if time.monotonic() > deadline or ended:
                return found() or None
            time.sleep(0.1)
        return value

    @property
    def goes_on(self) -> bool:
        """Whether a step was made just now."""
        return bool(self.lines()) and time.time() - float(self.lines()[-1][0]) < RECENT_S

    def wait_for_steps(self, count: int) -> None:
        if not self.wait(START_S, lambda: len(self.lines()) >= count):
            raise TimeoutError("\n".join(p.read_text()[-3000:] for p in self.folder.glob("*.log")))

    def measure(self) -> float | None:
        """Seconds until training goes on after the fault; None for never."""
        began = time.time()
        self.start()
        if self.row == "clock":
            whole = self.wait(NEVER_S, lambda: [x for x in self.lines() if x[3] == "3"])
            return float(whole[0][0]) - began if whole else None
        self.wait_for_steps(20)
        if self.row == "supervisor":
            return self.measure_supervisor()
        before = {x[1] for x in self.lines()}
        at = time.time()
        self.harm()
        new = self.wait(NEVER_S, lambda: [x for x in self.lines() if x[1] not in before])
        return float(new[0][0]) - at if new else None

    def measure_supervisor(self) -> float | None:
        raise NotImplementedError

    def harm(self) -> None:
        host = self.choose_host()
        match self.row:
            case "worker":
                os.kill(self.find(host, "rank"), signal.SIGKILL)
            case "stopped" | "long":
                os.kill(self.find(host, "rank"), signal.SIGSTOP)
            case "agent":
                os.kill(self.find(host, "agent"), signal.SIGKILL)
            case "cut":
                self.hosts.cut(host)
            case _:
                self.hosts.crash(host)

    def choose_host(self) -> int:
        """The host that is struck."""
        return 1 if self.row == "store" else 2

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
    name, module = "torchrun", "torch.distributed.run"
    options: tuple[str, ...] = ()

    def start(self) -> None:
        for i in (1, 2, 3):
            self.spawn(i, [
                sys.executable, "-m", self.module, f"--nnodes={'3' if self.row == 'fixed' else '2:3'}", "--nproc-per-node=1",
                "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.hosts.address(1)}:29400", "--rdzv-id=x",
                "--rdzv-conf=join_timeout=60,last_call_timeout=10", f"--local-addr={self.hosts.address(i)}", *self.options,
                *self.words,
            ], **self.set_clock(i))  # fmt: skip

    def find(self, host: int, role: str) -> int:
        for pid in self.hosts.pids(host):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            is_agent = self.module.encode() in words
            if (
                b"train.py" in b" ".join(words)
                and is_agent == (role == "agent")
                and b"python" in words[0].rpartition(b"/")[2]
            ):
                return pid
        raise LookupError(f"no {role} on host {host}")


class Nvrx(Torchrun):
    name, module = "nvrx", "nvidia_resiliency_ext.fault_tolerance.launcher"
    options = ("--ft-param-initial_rank_heartbeat_timeout=600", "--ft-param-rank_heartbeat_timeout=600")

    @staticmethod
    def why_not() -> str:
        known = importlib.util.find_spec("nvidia_resiliency_ext")
        return "" if known else "not installed: pip install nvidia-resiliency-ext"


class Dlrover(Torchrun):
    name, module = "dlrover", "dlrover.trainer.torch.elastic_run"

    @staticmethod
    def why_not() -> str:
        return "" if importlib.util.find_spec("dlrover") else "not installed: pip install dlrover[torch]"

    def start(self) -> None:
        master = f"{self.hosts.address(1)}:29500"
        self.spawn(1, [
            sys.executable, "-m", "dlrover.python.master.main", "--platform", "local", "--port", "29500", "--node_num", "3",
            "--job_name", "x",
        ])  # fmt: skip
        for i in (1, 2, 3):
            number = str(i - 1)
            self.spawn(i, [
                sys.executable, "-m", self.module, f"--nnodes={'3' if self.row == 'fixed' else '2:3'}", "--nproc-per-node=1",
                "--max-restarts=3", "--rdzv-conf=join_timeout=60,last_call_timeout=10", *self.words,
            ], DLROVER_MASTER_ADDR=master, NODE_ID=number, NODE_RANK=number, NODE_NUM="3", NODE_TYPE="worker",
                ELASTIC_JOB_NAME="x", POD_IP=self.hosts.address(i), **self.set_clock(i))  # fmt: skip


class Unbroken(Contender):
    name = "unbroken"
    options: tuple[str, ...] = ()

    def start(self) -> None:
        for i in (1, 2, 3, 4):
            self.hosts.serve_ssh(i, **self.set_clock(i))
        self.hosts.wait_for_ssh([1, 2, 3, 4])
        self.supervise(0)

    def supervise(self, host: int) -> None:
        record = "shared" if self.row == "supervisor" else "own-disk"
        self.spawn(host, [
            sys.executable, "-m", "unbroken", "run", "--run-dir", str(self.folder / "run"), "--nodes", "3", "--spares", "1",
            "--record", record, "--hang-after", "20s", *self.options, "--cluster", self.hosts.cluster([1, 2, 3, 4]), "--", *self.words,
        ])  # fmt: skip

    def measure_supervisor(self) -> float | None:
        """The longest time between two steps, from before its host was lost until its successor has been there for 5 s."""
        first = len(self.lines()) - 1
        self.hosts.crash(0)
        self.supervise(HOSTS - 1)
        if not self.wait(NEVER_S, lambda: len(read_terms(RunDir(self.folder / "run"))) > 1):
            return None
        until = time.time() + 5
        if not self.wait(NEVER_S, lambda: float(self.lines()[-1][0]) > until):
            return None
        return max(float(b[0]) - float(a[0]) for a, b in pairwise(self.lines()[first:]))

    def choose_host(self) -> int:
        # One that was slow to start is the spare now: it has to be one that trains.
        records = read_journal(RunDir(self.folder / "run")).records
        slots = [r["slots"] for r in records if r["kind"] == "attempt"][-1]
        return int(slots[super().choose_host() - 1].removeprefix("h"))

    @property
    def run_id(self) -> str:
        return read_spec(RunDir(self.folder / "run").spec).run_id

    def find(self, host: int, role: str) -> int:
        return next(p.pid for p in marked(self.run_id, node=f"h{host}") if p.role == role)

    def end(self) -> None:
        super().end()
        if RunDir(self.folder / "run").spec.exists():
            end(lambda: marked(self.run_id))


class Warm(Unbroken):
    name = "warm"
    options = ("--warm-after", "1s")

    def wait_for_steps(self, count: int) -> None:
        super().wait_for_steps(count)
        if not self.wait(START_S, lambda: len(self.find_warm()) == 4):
            raise TimeoutError(f"warm processes on {self.find_warm()} alone")

    def find_warm(self) -> set[str]:
        """The hosts that have theirs, or can have none."""
        return {r["node"] for r in read_journal(RunDir(self.folder / "run")).records if r["kind"] == "warm"}


CONTENDERS: dict[str, type[Contender]] = {c.name: c for c in (Unbroken, Warm, Torchrun, Nvrx, Dlrover)}


def find_faketime() -> str:
    """The library that gives processes another clock; nothing where it is not installed."""
    return next((str(p) for p in Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), "")


def measure(kind: type[Contender], row: str) -> dict[str, Any]:
    """One figure: `seconds` (None for never), or `why` there is none."""
    if row == "supervisor" and not issubclass(kind, Unbroken):
        return {"why": "it has no such host"}
    if row == "fixed" and issubclass(kind, Unbroken):
        return {"why": "see the row host: it has a spare"}
    if why := kind.why_not():
        return {"why": why}
    if row == "clock" and not find_faketime():
        return {"why": "no libfaketime here: apt-get install libfaketime"}
    with tempfile.TemporaryDirectory() as folder, net_hosts(Path(folder) / "hosts", HOSTS) as hosts:
        contender = kind(hosts, Path(folder) / "run", row)
        load, goes_on = round(os.getloadavg()[0], 1), False
        try:
            seconds = contender.measure()
            goes_on = contender.goes_on
        except (TimeoutError, LookupError, StopIteration) as e:
            return {"why": f"{type(e).__name__}: {str(e)[-2000:]}", "load": load}
        finally:
            contender.end()
    return {"seconds": None if seconds is None else round(seconds, 1), "goes_on": goes_on, "load": load}


def make_table(rows: dict[str, dict[str, Any]]) -> str:
    """The figures in Markdown, as docs/cluster.md shows them."""
    names = [n for n in CONTENDERS if any("seconds" in cells.get(n, {}) for cells in rows.values())]

    def show(cell: dict[str, Any] | None) -> str:
        if cell is None or "seconds" not in cell:
            return ""
        if cell["seconds"] is None:
            return "never; trains on by itself" if cell["goes_on"] else "never"
        return f"{cell['seconds']:.0f} s"

    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for row in (r for r in ROWS if r in rows):
        lines.append(f"| {row} | {' | '.join(show(rows[row].get(n)) for n in names)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    found: dict[str, Any] = {"rows": {}}
    if args.out and args.out.exists():
        found = json.loads(args.out.read_text())
    found["machine"] = describe_machine()
    for row in args.rows:
        for name in args.contenders:
            cell = measure(CONTENDERS[name], row)
            found["rows"].setdefault(row, {})[name] = cell
            seconds = cell.get("seconds", cell.get("why"))
            never = "never, and trains on" if cell.get("goes_on") else "never"
            print(f"{row}: {name} {never if seconds is None else seconds}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(make_table(found["rows"]))


if __name__ == "__main__":
    main()
