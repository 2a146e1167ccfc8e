"""Writes the run directory that a run with given incidents would have left, through the real writers.

    made = RunFolder(RunDir(tmp_path / "run"), nodes=2, nproc=2, spares=1, began=1.75e9)
    made.attempt()
    made.steps(100)
    made.incident("failed", rank=1, back_to=80)
    made.steps(100)
    made.end("completed")

Time is simulated: each call moves `made.now` on. For tests of everything that reads a run directory.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field

from unbroken.progress import JournalWriter, RunDir, RunSpec, claim, read_terms, write_spec
from unbroken.progress.journal import sealable
from unbroken.progress.records.incident import Incident
from unbroken.progress.records.steps import Step, step_record
from unbroken.progress.records.verdict import Action, Category, Faulty, Outcome, Root, Verdict

_VERDICTS = {
    "failed": (Outcome.FAILED, Category.INFRASTRUCTURE, "CUDAError", "CUDA error: an illegal memory access"),
    "hung": (Outcome.HUNG, None, "Hang", "no step for 12.0 s; rank waits in futex_wait"),
    "node_lost": (Outcome.FAILED, Category.INFRASTRUCTURE, "NodeFailure", "the node is gone"),
    "bug": (Outcome.FAILED, Category.SCRIPT, "KeyError", "KeyError: 'tokens'"),
}


@dataclass
class RunFolder:
    """A run directory in the making. `step_s` is the time of a step, `start_s` that of a start to its first step."""

    run_dir: RunDir
    nodes: int = 2
    nproc: int = 2
    spares: int = 1
    began: float = 1.75e9
    step_s: float = 0.5
    start_s: float = 6.0
    seed: int = 1
    now: float = 0.0
    step: int = -1
    number: int = 0
    incidents: int = 0
    term: int = 0
    slots: list[str] = field(default_factory=list)
    free: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.began
        self.run_dir.create()
        self._random = random.Random(self.seed)
        self.spec = RunSpec(
            ("train.py", "--lr", "3e-4"),
            "feedbeef0001",
            nodes=self.nodes,
            nproc=self.nproc,
            spares=self.spares,
        )
        write_spec(self.run_dir, self.spec)
        names = [f"node-{i:03d}" for i in range(self.nodes + self.spares)]
        self.slots, self.free = names[: self.nodes], names[self.nodes :]
        self._journal: JournalWriter | None = None
        self._pending: Incident | None = None
        self._floor = -1
        self.supervisor()
        self.record("run", run_id=self.spec.run_id, command=list(self.spec.command), cwd="/home/user")

    def supervisor(self) -> None:
        """A supervisor (this process) claims the next epoch."""
        self.term += 1
        before = read_terms(self.run_dir)
        claim(
            self.run_dir, self.term, run_id=self.spec.run_id, address=("127.0.0.1", 1),
            sealed=sealable(self.run_dir, before),
        )  # fmt: skip
        if self._journal is not None:
            self._journal.close()
        self._journal = JournalWriter(self.run_dir, self.term, lambda: self.now)
        self.record("epoch", host="here", pid=1, takes_over=self.term - 1 or None)

    def record(self, kind: str, **fields: object) -> None:
        """Journals one record at the simulated time."""
        if self._journal is None:
            raise RuntimeError("there is no supervisor")
        self._journal.append(kind, **fields)

    def attempt(self) -> None:
        """Launches the next attempt."""
        self.number += 1
        self.now += 0.4
        origin = [{"step": self.step, "attempt": self.number - 1, "name": None, "memory": {"0": "x"}}]
        self.record(
            "attempt", attempt=self.number, slots=self.slots, candidates=origin if self.step >= 0 else []
        )
        for slot, node in enumerate(self.slots):
            for rank in range(slot * self.nproc, (slot + 1) * self.nproc):
                log = self.run_dir.rank_log(self.number, node, rank)
                log.parent.mkdir(parents=True, exist_ok=True)
                log.write_text(f"rank {rank} of attempt {self.number}\n")
        if self._pending is not None:
            self._pending.phases |= {"schedule": 0.4, "start": 0.4 * self.start_s}
            self._pending.next_attempt = self.number
        self.now += self.start_s

    def steps(self, count: int, *, losses: dict[int, float] | None = None) -> None:
        """Completes `count` steps; `losses` overrides those of some steps."""
        lines = []
        for _ in range(count):
            self.step += 1
            self.now += self.step_s * (0.9 + 0.2 * self._random.random())
            # A function of the step alone, so that a replayed step has the loss that it had.
            noise = 0.1 * (math.sin(12.9898 * self.step) * 43758.5453 % 1.0 - 0.5)
            loss = (losses or {}).get(self.step, 2.0 + 8.0 * math.exp(-self.step / 400) + noise)
            lines.append(json.dumps(step_record(Step(self.step, loss, 65536, self.now))) + "\n")
            if self._pending is not None and self.step > self._floor:
                self._resume()
        path = self.run_dir.steps(self.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as f:
            f.writelines(lines)

    def incident(
        self, kind: str, *, rank: int | None = None, back_to: int | None = None, unnoticed_s: float = 2.0
    ) -> None:
        """Something happens: failed, hung, node_lost (a spare takes over) or bug (stops the run); the next
        attempt begins after step `back_to` (default: here)."""
        self.incidents += 1
        outcome, category, reason, text = _VERDICTS[kind]
        at = self.now
        rank = self._random.randrange(self.nodes * self.nproc) if rank is None else rank
        node = self.slots[rank // self.nproc]
        named = None if kind == "node_lost" else rank
        log = self.run_dir.rank_log(self.number, node, rank)
        stop = kind == "bug"
        self.now += unnoticed_s
        incident = Incident(
            self.incidents, self.number, "failed" if stop else kind, self.step, at, self.now,
            Verdict(
                outcome, category, reason, Root(str(log), 1, text, named, node, at), faulty=Faulty(node, named),
                recoverable=not stop, action=Action.STOP if stop else Action.RESTART, confidence=0.95,
                mitigation="Fix the script." if stop else "Restart.", decided_by="test-rule",
            ),
            action="stop" if stop else "restart", why="a restart cannot help" if stop else "restart 1 of 10",
            nodes={node: "gone"} if kind == "node_lost" else {},
            phases={"detect": unnoticed_s, "stop": 0.3, "diagnose": 0.2},
        )  # fmt: skip
        self.now += 0.5
        incident.write(self.run_dir)
        self.record("ended", attempt=self.number, how=incident.kind, step=self.step)
        self.record(
            "incident", incident=incident.number, attempt=self.number, what=incident.kind, step=self.step,
            cause="failure", fingerprint=reason, reason=reason, action=incident.action,
        )  # fmt: skip
        if stop:
            self.record("status", status="stopped", why=f"{reason}: a restart cannot help")
            return
        if kind == "node_lost":
            self.record("lost", node=node, reason=reason)
            if self.free:
                self.slots[rank // self.nproc] = self.free.pop(0)
            else:
                self.record("returned", node=node)
        self.record("seal", attempt=self.number, checkpoints=[])
        self._pending, self._floor = incident, self.step
        if back_to is not None:
            incident.steps_lost = self.step - back_to
            self.step = back_to
        else:
            incident.steps_lost = 0
        self.attempt()

    def _resume(self) -> None:
        incident, self._pending = self._pending, None
        if incident is None:
            return
        incident.resumed = self.now
        incident.resumed_step = self.step
        incident.phases |= {
            "restore_and_first_step": 0.6 * self.start_s, "replay": (incident.steps_lost or 0) * self.step_s,
        }  # fmt: skip
        incident.write(self.run_dir)
        self.record("resumed", incident=incident.number, attempt=self.number, step=self.step)

    def pause(self, seconds: float) -> None:
        """The run is stopped on request, and the command is given again after `seconds`."""
        self.record("ended", attempt=self.number, how="interrupted", step=self.step)
        self.record("status", status="interrupted", step=self.step)
        self.now += seconds
        self.supervisor()
        self.attempt()

    def end(self, status: str = "completed") -> None:
        """The run ends."""
        self.now += 1.0
        self.record("ended", attempt=self.number, how=status, step=self.step)
        self.record("status", status=status, step=self.step)
