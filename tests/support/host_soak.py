"""Random faults on hosts for minutes: the run ends by itself, nobody touched it, and each sample came once.

    python -m tests.support.host_soak --minutes 30 --seed 1 [--out RESULT.json]     # as root

Three hosts and a spare in network namespaces train with a real Checkpointer, `unbroken.data` and its journal; the record lies in a
shared folder, which is a small file system of its own. Two more hosts have the supervisor by turns: whatever starts services there
(here this program) gives the same command again when it was killed, or its host was lost, as systemd would; else nobody does
anything. Struck are: ranks, agents, keepers, supervisors (kill -9); ranks, agents, supervisors (SIGSTOP, some go on later); links of
hosts and of the supervisor (cut, or one way only, healed later); hosts and the supervisor's host (gone, back later, empty); the disk
(full for a while). One sample makes the loss NaN, so that there is a rollback and samples that are skipped.

Judged afterwards, from the files alone: the run completed; what the surviving lineage consumed (from the journal of the data) and what
is skipped are together each sample once; little was skipped; nothing superseded was used
(tests/support/superseded.py); every checkpoint with a marker verifies; no process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.checkpoint.catalogue.contents import listing, verify_in
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.cluster.holding.processes import marked
from unbroken.data.position import Ranges, count, normalize, subtract
from unbroken.progress import RunDir, read_journal, read_spec
from unbroken.progress.records.incident import read_incidents
from unbroken.testing.faults import RunFaults

from .net_hosts import NetHosts, net_hosts, why_not
from .superseded import check_run, read_counted

SUPERVISORS, TRAINERS, RANKS, BATCH = (0, 5), (1, 2, 3, 4), 3, 4
LEASE_S, LONG_S = 15, 40.0
"""Seconds: the run's lease, and how long a fault lasts at most."""
STEPS_PER_MINUTE = 250
"""At ten a second 40 % of the time is training: the rest is faults. What is left after them is trained without."""
SCRIPT = """
import json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
import unbroken, unbroken.data

samples, bad, final = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

class Numbers(Dataset):
    def __len__(self):
        return samples
    def __getitem__(self, i):
        return torch.full((8,), float("nan") if i == bad else (i % 97) / 97)

torch.set_num_threads(1)
run = unbroken.attach(total_steps=samples // 12)
dist.init_process_group("gloo", timeout=timedelta(seconds=15))
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = unbroken.data.wrap(DataLoader(Numbers(), batch_size=4, shuffle=True), on_batch=unbroken.data.Journal())
checkpoints = unbroken.Checkpointer(snapshot_every=5, persist_every=25)
checkpoints.restore(state := {"model": model, "optimizer": optimizer, "loader": loader})
for epoch in loader.epochs(1):
    for batch in loader:
        time.sleep(0.1)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        dist.all_reduce(value)
        run.step(loader.step, loss=value.item(), tokens=12)
        if checkpoints.due(loader.step):
            checkpoints.save(loader.step, state)
        if run.should_stop(loader.step):
            sys.exit(unbroken.EXIT_STOPPED)
if dist.get_rank() == 0:
    with open(final, "w") as f:
        json.dump(loader.position().as_json(), f)
checkpoints.close()
"""


@dataclass
class Soaked:
    """What was seen; `problems` is empty where everything held."""

    seed: int
    minutes: float
    faults: Counter[str] = field(default_factory=Counter)
    supervisors: int = 0
    attempts: int = 0
    incidents: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    consumed: int = 0
    skipped: int = 0
    checkpoints: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """The verdict, for a person."""
        kinds = ", ".join(f"{n} x {kind}" for kind, n in sorted(self.faults.items()))
        seen = (
            f"seed {self.seed}, {self.minutes:g} minutes of faults in {self.seconds:.0f} s: {sum(self.faults.values())} faults ({kinds}), "
            f"{self.attempts} attempts, {self.supervisors} supervisors; {self.samples} samples = {self.consumed} consumed + "
            f"{self.skipped} skipped; {self.checkpoints} checkpoints verified"
        )  # fmt: skip
        if not self.problems:
            return f"HELD      {seen}; each sample once, nothing superseded used, no process left, nobody touched it"
        return "\n".join([f"NOT HELD  {seen}", *(f"          {p}" for p in self.problems)])


class Soak:
    """One run, and what happens to it."""

    def __init__(self, hosts: NetHosts, folder: Path, minutes: float, seed: int) -> None:
        self.hosts, self.folder, self.rng, self.result = (
            hosts,
            folder,
            random.Random(seed),
            Soaked(seed, minutes),
        )
        self.run_dir, self.final = RunDir(folder / "disk" / "run"), folder / "final.json"
        self.samples = max(300, int(minutes * STEPS_PER_MINUTE)) * RANKS * BATCH
        self.bad = self.rng.randrange(self.samples)
        (folder / "train.py").write_text(SCRIPT)
        self.process: subprocess.Popen[bytes] | None = None
        self.host = SUPERVISORS[0]
        self._again_at = 0.0
        self._heals: list[tuple[float, str, Callable[[], None]]] = []
        self._busy: dict[str, float] = {}
        """What is broken now -> until when."""

    # --- what a service manager does

    def supervise(self) -> None:
        """Gives the command on the host `self.host`."""
        command = [
            sys.executable, "-m", "unbroken", "run", "--run-dir", str(self.run_dir.path), "--nodes", "3", "--spares", "1", "--record",
            "shared", "--cluster", self.hosts.cluster(list(TRAINERS)), "--lease", f"{LEASE_S}s", "--hang-after", "20s",
            "--suspect-after", "3s", "--warm-after", "2s", "--host-memory", "64MiB", "--", "train.py", str(self.samples), str(self.bad), str(self.final),
        ]  # fmt: skip
        env = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(self.folder / "state"),
        }
        with open(self.folder / "supervisor.log", "ab") as log:
            log.write(f"--- on h{self.host}\n".encode())
            self.process = subprocess.Popen(
                self.hosts.argv(self.host, command), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )  # fmt: skip
        self.result.supervisors += 1

    def watch_service(self) -> bool:
        """Starts it again where it was killed; whether the run goes on."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            return True
        if code == -signal.SIGKILL:
            if not self._again_at:
                self._again_at = time.monotonic() + self.rng.uniform(0.5, 3)
            elif time.monotonic() > self._again_at and (there := self.reachable_hosts()):
                self._again_at = 0.0
                self.host = self.rng.choice(there)
                self.supervise()
            return True
        if code:
            self.problem(f"the supervisor ended with {code}: {self.said()[-600:]}")
        return False

    def reachable_hosts(self) -> list[int]:
        """Those where a supervisor can be started now."""
        return [h for h in SUPERVISORS if f"h{h}" not in self._busy]

    def said(self) -> str:
        return (self.folder / "supervisor.log").read_text(errors="replace")

    def problem(self, text: str) -> None:
        self.result.problems.append(text)
        self.tell(f"PROBLEM {text}")

    def tell(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)

    # --- faults

    def processes(self, role: str) -> list[tuple[str, int]]:
        """(node, process) of the ranks' own, the agents or keepers."""
        run_id = read_spec(self.run_dir.spec).run_id
        return sorted({(p.node, p.pid) for p in marked(run_id) if p.role == role and p.state not in "ZX"})

    def later(self, what: str, heal: Callable[[], None]) -> float:
        """Heals it after a random time; how long that is."""
        seconds = self.rng.uniform(1, LONG_S)
        self._busy[what] = time.monotonic() + seconds
        self._heals.append((self._busy[what], what, heal))
        return seconds

    def heal(self, *, all_of_it: bool = False) -> None:
        """What is due."""
        for item in list(self._heals):
            if all_of_it or item[0] <= time.monotonic():
                self._heals.remove(item)
                self._busy.pop(item[1], None)
                item[2]()
                self.tell(f"    healed: {item[1]}")

    def strike(self) -> None:
        """One fault; none where what it would hit is not there at this moment."""
        kind = self.rng.choice(sorted(FAULTS))
        with contextlib.suppress(IndexError, ProcessLookupError, OSError):
            if what := FAULTS[kind](self):
                self.result.faults[kind] += 1
                step = max(
                    (
                        int(r["step"])
                        for r in read_journal(self.run_dir).records
                        if r.get("kind") == "durable"
                    ),
                    default=0,
                )
                self.tell(f"{sum(self.result.faults.values())}. {kind}: {what}; step {step} is durable")

    def kill(self, role: str, sig: signal.Signals) -> str:
        node, pid = self.rng.choice(self.processes(role))
        os.kill(pid, sig)
        if sig is signal.SIGSTOP and (role != "rank" or self.rng.random() < 0.5):  # else it never goes on

            def go_on() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

            return f"{role} {pid} of {node} for {self.later(f'{role} {pid}', go_on):.0f} s"
        return f"{role} {pid} of {node}"

    def supervisor(self, sig: signal.Signals) -> str:
        assert self.process is not None
        process = self.process
        if process.poll() is not None:
            return ""
        process.send_signal(sig)
        if sig is signal.SIGSTOP:
            seconds = self.later(f"supervisor {process.pid}", lambda: process.send_signal(signal.SIGCONT))
            return f"on h{self.host} for {seconds:.0f} s"
        return f"on h{self.host}"

    def network(self, host: int, fault: Callable[[int], None], back: Callable[[int], None]) -> str:
        if f"h{host}" in self._busy:
            return ""
        fault(host)
        return f"h{host} for {self.later(f'h{host}', lambda: back(host)):.0f} s"

    def cut(self, host: int) -> str:
        return self.network(host, self.hosts.cut, self.hosts.heal)

    def deafen(self, host: int) -> str:
        return self.network(host, lambda h: self.hosts.deafen(h, list(SUPERVISORS)), self.hosts.heal)

    def crash(self, host: int) -> str:
        def back(number: int) -> None:
            self.hosts.heal(number)
            if number in TRAINERS:
                self.hosts.serve_ssh(number)

        return self.network(host, self.hosts.crash, back)

    def fill(self) -> str:
        filler = self.folder / "disk" / "filler"
        if "disk" in self._busy:
            return ""
        with open(filler, "wb", buffering=0) as f, contextlib.suppress(OSError):
            while f.write(b"\0" * (1 << 20)):
                pass
        return f"for {self.later('disk', lambda: filler.unlink(missing_ok=True)):.0f} s"

    # --- the whole

    def run(self) -> Soaked:
        began = time.monotonic()
        until, over = 0.0, began + self.result.minutes * 60 * 2 + 900
        for host in TRAINERS:
            self.hosts.serve_ssh(host)
        self.hosts.wait_for_ssh(list(TRAINERS))
        self.supervise()
        next_at = 0.0
        while self.watch_service():
            self.heal()
            now = time.monotonic()
            if not until and self.trains():
                until = now + self.result.minutes * 60
            if now > over:
                self.problem(f"the run did not end within {over - began:.0f} s: {self.said()[-600:]}")
                break
            if next_at < now < until:
                self.strike()
                # Half of the faults meet training, half a recovery from the one before.
                next_at = now + self.rng.choice([self.rng.uniform(0.2, 6), self.rng.uniform(10, 30)])
            time.sleep(0.1)
        self.heal(all_of_it=True)
        now = time.monotonic()
        self.result.seconds = round(now - began, 1)
        if until > now:
            self.result.minutes = round(self.result.minutes - (until - now) / 60, 1)  # it was done before
        return self.judge()

    def trains(self) -> bool:
        """Whether there was a first step: from then on things happen."""
        if not self.run_dir.journals.exists():
            return False
        return any(r["kind"] == "first_step" for r in read_journal(self.run_dir).records)

    def judge(self) -> Soaked:
        records = read_counted(self.run_dir.path)
        self.result.attempts = max(
            (int(r["attempt"]) for r in records if r.get("kind") == "attempt"), default=0
        )
        self.result.incidents = dict(Counter(str(i["kind"]) for i in read_incidents(self.run_dir)))
        self.result.problems += check_run(self.run_dir.path)
        if journal := read_journal(self.run_dir).damaged:
            self.result.problems.append(f"{journal} damaged lines in the journal")
        storage = PosixStorage(self.run_dir.checkpoints)
        for found in listing(storage):
            self.result.checkpoints += found.committed
            if found.committed and not (check := verify_in(storage, found.name, deep=True)).ok:
                self.result.problems.append(
                    f"{found.name} has a marker and does not verify: {check.problems[0]}"
                )
        left = [f"{p.role} {p.pid} on {p.node}" for p in marked(read_spec(self.run_dir.spec).run_id)]
        if left and not self.result.problems:
            self.result.problems.append(f"left behind: {left[:5]}")
        if self.final.exists():
            position = json.loads(self.final.read_text())
            lineage = list(read_lineage(records, self.run_dir.data))
            self.result.samples, self.result.consumed = self.samples, sum(count(part) for _, part in lineage)
            self.result.skipped = count(normalize(position["skips"]))
            self.result.problems += judge_samples(lineage, normalize(position["skips"]), self.samples)
            if self.result.skipped > 60 * RANKS * BATCH * 3:
                self.result.problems.append(f"{self.result.skipped} samples are skipped for a single bad one")
        else:
            self.result.problems.append("no rank said that it was done")
        return self.result


def read_lineage(records: list[dict[str, Any]], data: Path) -> Iterator[tuple[int, Ranges]]:
    """(step, samples of all ranks) of each step that survives into the last attempt, latest first; a step comes twice where its
    ranks do not agree."""
    restored = {
        int(r["attempt"]): (r.get("of"), r.get("step")) for r in records if r.get("kind") == "restored"
    }
    attempt: int | None = max(int(r["attempt"]) for r in records if r.get("kind") == "attempt")
    last = sys.maxsize
    while attempt is not None:
        of, step = restored.get(attempt, (None, None))
        first = int(step) + 1 if of is not None and step is not None else 1
        given: dict[int, set[Ranges]] = {}
        for path in data.glob(f"attempt-{attempt:04d}-rank-*.jsonl"):
            for text in path.read_text(errors="replace").split("\n")[:-1]:
                with contextlib.suppress(ValueError):  # torn by a full disk: another rank has the line too
                    line = json.loads(text)
                    if first <= line["step"] <= last:
                        given.setdefault(line["step"], set()).add(normalize(line["samples"]))
        for number in sorted(given, reverse=True):
            for samples in given[
                number
            ]:  # each rank writes what all have together: two of them would be counted twice
                yield number, samples
        attempt, last = (int(of), int(step)) if of is not None and step is not None else (None, 0)


def judge_samples(lineage: list[tuple[int, Ranges]], skips: Ranges, samples: int) -> list[str]:
    """What is wrong with the steps that survive: each sample has to be consumed once, or skipped."""
    problems = []
    steps = [s for s, _ in lineage]
    if len(set(steps)) != len(steps):
        problems.append(f"{len(steps) - len(set(steps))} steps survive twice")
    consumed = normalize(r for _, part in lineage for r in part)
    twice = sum(count(part) for _, part in lineage) - count(consumed)
    if twice:
        problems.append(f"{twice} samples were consumed twice")
    if missing := subtract(subtract([(0, samples)], consumed), skips):
        problems.append(f"{count(missing)} samples were neither consumed nor skipped: {missing[:3]}")
    if both := count(consumed) - count(subtract(consumed, skips)):
        problems.append(f"{both} samples are skipped and were consumed in steps that survive")
    if more := subtract(consumed, ((0, samples),)):
        problems.append(f"there are no such samples: {more[:3]}")
    return problems


FAULTS: dict[str, Callable[[Soak], str]] = {
    "rank killed": lambda s: s.kill("rank", signal.SIGKILL),
    "agent killed": lambda s: s.kill("agent", signal.SIGKILL),
    "keeper killed": lambda s: s.kill("keeper", signal.SIGKILL),
    "supervisor killed": lambda s: s.supervisor(signal.SIGKILL),
    "rank stopped": lambda s: s.kill("rank", signal.SIGSTOP),
    "agent stopped": lambda s: s.kill("agent", signal.SIGSTOP),
    "supervisor stopped": lambda s: s.supervisor(signal.SIGSTOP),
    "link cut": lambda s: s.cut(s.rng.choice(TRAINERS)),
    "link one way": lambda s: s.deafen(s.rng.choice(TRAINERS)),
    "supervisor's link cut": lambda s: s.cut(s.host),
    "host lost": lambda s: s.crash(s.rng.choice(TRAINERS)),
    "supervisor's host lost": lambda s: s.crash(s.host),
    "disk full": lambda s: s.fill(),
}


def main() -> int:
    """`python -m tests.support.host_soak`; prints its verdict, exits 0 where everything held."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.host_soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="keeps everything there")
    parser.add_argument("-o", "--out", type=Path, help="JSON with what was seen")
    args = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    folder = args.dir or Path(tempfile.mkdtemp(prefix="unbroken-hosts-"))
    (folder / "disk").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder / "disk")], check=True)
    try:
        with net_hosts(folder / "hosts", 6) as hosts:
            soak = Soak(hosts, folder, args.minutes, args.seed)
            try:
                result = soak.run()
            finally:
                if soak.process is not None and soak.process.poll() is None:
                    soak.process.kill()
                    soak.process.wait(10)
                if soak.run_dir.spec.exists():
                    RunFaults(soak.run_dir).end_everything()
    finally:
        subprocess.run(["cp", "-r", str(folder / "disk" / "run"), str(folder / "run")], check=False)
        subprocess.run(["umount", "-l", str(folder / "disk")], check=False)
    value = {**vars(result), "faults": dict(result.faults)}
    print(f"{result.describe()}\n          everything is in {folder}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(value, indent=1) + "\n")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
