"""A soak: random kill -9 of rank, agent, keeper or supervisor at random moments of a real run, judged afterwards.

    python -m tests.support.soak --kills 100 --seed 1

Checked while it goes: each checkpoint that is announced (journalled) is there and verifies byte by byte, as soon as it is
announced and in the midst of the kills. At the end too: what retention has not removed verifies; nothing that has a commit marker is torn; never do two attempts' ranks run at once; no process
and no shared memory is left; and the losses, batches and final state equal an undisturbed run's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.checkpoint.catalogue.contents import listing, verify_in
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.errors import RunError, UnbrokenError
from unbroken.progress import RunDir, read_journal
from unbroken.progress.records.candidate import folder_name
from unbroken.testing.faults import RunFaults
from unbroken.testing.scenario import Command, ScenarioSize
from unbroken.train.step_digests import read_step_digests

TARGETS = ("rank", "agent", "keeper", "supervisor")


@dataclass
class Soaked:
    """What a soak saw; `problems` is empty where everything held."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    announced: int = 0
    checked: int = 0
    """Announced checkpoints that were read, byte by byte, as soon as they were announced."""
    verified: int = 0
    """Checkpoints that were read when a run had ended."""
    seconds: float = 0.0
    runs: int = 0
    longest_pause_s: float = 6.0
    problems: list[str] = field(default_factory=list)


class Watch(threading.Thread):
    """Looks all the time for ranks of two attempts at once."""

    def __init__(self, faults: RunFaults, problems: list[str]) -> None:
        super().__init__(daemon=True)
        self._faults, self._problems, self._ended = faults, problems, threading.Event()
        self.looks = 0

    def run(self) -> None:
        while not self._ended.wait(0.02):
            ranks = self._faults.processes("rank")
            attempts = {p.attempt for p in ranks if p.state not in "ZX"}
            self.looks += 1
            if len(attempts) > 1:
                self._problems.append(f"ranks of attempts {sorted(attempts)} ran at once")
                return

    def end(self) -> None:
        self._ended.set()
        self.join(5)


class Reader(threading.Thread):
    """Reads every checkpoint as soon as it is announced: the newest may never be missing or torn."""

    def __init__(self, run_dir: RunDir, name: str, result: Soaked) -> None:
        super().__init__(daemon=True)
        self._run_dir, self._name, self._result, self._ended = run_dir, name, result, threading.Event()

    def run(self) -> None:
        seen: set[tuple[int, int]] = set()
        while not self._ended.wait(0.1):
            newest = self._newest()
            if newest is None or newest in seen:
                continue
            seen.add(newest)
            why = self._look(newest)
            if not why:
                self._result.checked += 1
            elif (
                newest == self._newest()
            ):  # else it is retention's: a newer one was announced while it was read
                self._result.problems.append(f"{self._name}: {newest} was announced and {why}")
                return

    def _newest(self) -> tuple[int, int] | None:
        if not self._run_dir.journals.exists():
            return None
        records = read_journal(self._run_dir).records
        return max(((r["attempt"], r["step"]) for r in records if r["kind"] == "durable"), default=None)

    def _look(self, mark: tuple[int, int]) -> str:
        storage = PosixStorage(self._run_dir.checkpoints)
        attempt, step = mark
        try:
            check = verify_in(storage, folder_name(step, attempt), deep=True)
        except UnbrokenError as e:
            return f"cannot be read: {e.message}"
        return "" if check.ok else f"does not verify: {check.problems[0]}"

    def end(self) -> None:
        self._ended.set()
        self.join(30)


def soak(folder: Path, kills: int, seed: int, shape: ScenarioSize, say: object = print) -> Soaked:
    """Kills until `kills` have struck, over as many runs as that takes; each run must end like the undisturbed one."""
    rng = random.Random(seed)
    result = Soaked(seed)
    began = time.monotonic()
    tell = say if callable(say) else print
    reference = Command(
        folder / "reference",
        shape.options(0),
        shape.script(folder / "w" / "ref-{rank}.jsonl"),
        folder,
        lambda _: None,
    )
    folder.mkdir(parents=True, exist_ok=True)
    reference.start()
    if reference.wait(300) != 0:
        raise RunError("the reference run did not complete", where=str(folder))
    first = next(r for r in read_journal(RunDir(folder / "reference")).records if r["kind"] == "first_step")
    # Half of the kills meet a start or a recovery, half meet training.
    result.longest_pause_s = 2.5 * first["seconds"]
    while sum(result.kills.values()) < kills and not result.problems:
        result.runs += 1
        _one_run(folder, f"run-{result.runs}", kills, rng, shape, result, tell)
    result.seconds = time.monotonic() - began
    return result


def _one_run(
    folder: Path, name: str, kills: int, rng: random.Random, shape: ScenarioSize, result: Soaked, tell: object
) -> None:
    lines: list[str] = []
    command = Command(
        folder / name,
        shape.options(shape.spares),
        shape.script(folder / "w" / f"{name}-{{rank}}.jsonl"),
        folder,
        lines.append,
    )
    command.start()
    run_dir = RunDir(folder / name)
    deadline = time.monotonic() + 30
    while not run_dir.term(1).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    faults = RunFaults(run_dir)
    watch = Watch(faults, result.problems)
    reader = Reader(run_dir, name, result)
    watch.start()
    reader.start()
    struck_here = 0
    try:
        while command.running or not _over(run_dir):
            if not command.running:
                if command.process is not None and command.process.returncode not in (0, -9):
                    result.problems.append(f"{name} ended with {command.process.returncode}: {lines[-1:]}")
                    return
                command.start()
            if sum(result.kills.values()) < kills and struck_here < 40:
                # Kills come at any moment: while agents start, ranks import, snapshots are taken, others recover.
                pause = time.monotonic() + rng.uniform(0.2, result.longest_pause_s)
                while time.monotonic() < pause and command.running:
                    time.sleep(0.02)
                if command.running and (kind := _strike(faults, rng)):
                    result.kills[kind] += 1
                    struck_here += 1
                    if callable(tell):
                        tell(
                            f"{name}: kill {sum(result.kills.values())} of {kills}: {kind} at step {faults.step()[1]}"
                        )
            else:
                time.sleep(0.05)
    finally:
        watch.end()
        reader.end()
        command.end()
    _judge(folder, name, run_dir, faults, shape, result)


def _over(run_dir: RunDir) -> bool:
    return any(
        r["kind"] == "status" and r["status"] == "completed" for r in read_journal(run_dir).records[-3:]
    )


def _strike(faults: RunFaults, rng: random.Random) -> str | None:
    """One kill -9; None where the target was not there at this moment."""
    kind = rng.choice(TARGETS)
    try:
        if kind == "rank":
            faults.kill_rank(rng.choice(sorted(faults.ranks())))
        elif kind == "supervisor":
            faults.kill_supervisor()
        else:
            there = faults.processes(kind)
            (faults.kill_agent if kind == "agent" else faults.kill_keeper)(
                rng.choice(sorted({p.node for p in there}))
            )
    except (IndexError, RunError, ProcessLookupError):
        return None
    return kind


def _judge(
    folder: Path, name: str, run_dir: RunDir, faults: RunFaults, shape: ScenarioSize, result: Soaked
) -> None:
    journal = read_journal(run_dir)
    problems = result.problems
    if journal.damaged:
        problems.append(f"{name}: {journal.damaged} damaged journal lines")
    result.attempts += max((r["attempt"] for r in journal.records if r["kind"] == "attempt"), default=0)
    announced = {(r["step"], r["attempt"]) for r in journal.records if r["kind"] == "durable"}
    result.announced += len(announced)
    storage = PosixStorage(run_dir.checkpoints)
    found = listing(storage)
    present = {(f.step, f.attempt) for f in found if f.committed}
    for f in found:
        if f.committed:
            check = verify_in(storage, f.name, deep=True)
            result.verified += 1
            if not check.ok:
                problems.append(
                    f"{name}: {f.name} has a commit marker and does not verify: {check.problems[0]}"
                )
    newest = max(announced, default=None)
    if newest is not None and newest not in present and max(present, default=(-1, -1)) < newest:
        problems.append(f"{name}: checkpoint {newest} was announced and is gone")
    left = faults.left_over()
    if left:
        problems.append(f"{name} left behind: {left[:3]}")
    for rank in range(shape.world_size):
        a = read_step_digests(folder / "w" / f"ref-{rank}.jsonl")
        b = read_step_digests(folder / "w" / f"{name}-{rank}.jsonl")
        if not a.same_as(b):
            problems.append(f"{name}, rank {rank}: {a.difference(b)}")
            break


def main() -> int:
    """`python -m tests.support.soak`; prints one JSON object, exits 0 where everything held."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("-o", "--out", type=Path, help="JSON with what was seen")
    args = parser.parse_args()
    shape = ScenarioSize(steps=args.steps, nodes=args.nodes, nproc=args.nproc, spares=0, hang_after="30s")
    folder = args.dir or Path(tempfile.mkdtemp(prefix="unbroken-soak-"))
    try:
        result = soak(
            folder, args.kills, args.seed, shape, lambda line: print(line, file=sys.stderr, flush=True)
        )
    except UnbrokenError as e:
        print(f"soak: {e}", file=sys.stderr)
        return e.exit_code
    value = {
        "seed": result.seed, "kills": dict(result.kills), "runs": result.runs, "attempts": result.attempts,
        "announced": result.announced, "checked_when_announced": result.checked, "verified": result.verified, "seconds": round(result.seconds, 1),
        "problems": result.problems,
    }  # fmt: skip
    print(json.dumps(value | {"folder": str(folder)}))
    if args.out:
        args.out.write_text(json.dumps(value, indent=1) + "\n")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
