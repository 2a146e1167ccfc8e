"""The whole scenario of a run that survives, with real processes and real faults (what `unbroken demo` tells).

A reference run without faults; the same run with faults at random steps from a seed; a copy of it with a bug in
the script. Everything that is claimed is measured from outside: by the clock of this process, by the step digests
that each rank writes, by the files that the run leaves.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..progress import RunDir, read_journal
from ..progress.records.incident import read_incidents
from ..status import gather
from ..train.step_digests import read_step_digests
from .faults import RunFaults

KINDS = ("kill_rank", "stop_rank", "kill_node", "kill_supervisor")
WHAT = {
    "kill_rank": "kill -9 of one rank",
    "stop_rank": "SIGSTOP of one rank",
    "kill_node": "kill -9 of a whole node",
    "kill_supervisor": "kill -9 of the supervisor",
}
_WINDOW_FREE = 0.25


@dataclass(frozen=True)
class Planned:
    """A fault to inject once a rank has completed `step`; `target` picks the rank or node (0 to 1)."""

    kind: str
    step: int
    target: float


@dataclass
class InjectedFault:
    """One fault as it went. Times are seconds; `injected` is seconds since the epoch. `resumed_s` runs from the
    injection to the completion of the first step above the highest completed before it, `replay_s` is the part
    of it that repeats steps, `own_s` what is neither that nor the script's start, restore and first step: noticing, ending,
    diagnosing, deciding, launching."""

    kind: str
    at_step: int
    injected: float
    detected_s: float | None = None
    resumed_s: float | None = None
    replay_s: float = 0.0
    own_s: float | None = None
    steps_lost: int | None = None
    verdict: dict[str, Any] = field(default_factory=dict)
    action: str = ""
    what: str = ""


@dataclass
class Scenario:
    """All of it; `problems` lists whatever did not hold."""

    seed: int
    steps: int
    reference_loss: str = ""
    final_loss: str = ""
    identical: bool = False
    difference: str | None = None
    incidents: list[InjectedFault] = field(default_factory=list)
    attempts: int = 0
    ettr: float = 0.0
    cold_start_s: float = 0.0
    script_bug: dict[str, Any] = field(default_factory=dict)
    report: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """The object of `unbroken demo --json`."""
        return {
            "seed": self.seed,
            "steps": self.steps,
            "reference_loss": self.reference_loss,
            "final_loss": self.final_loss,
            "identical": self.identical,
            "difference": self.difference,
            "incidents": [
                {
                    "kind": t.kind, "at_step": t.at_step, "detected_s": _round(t.detected_s),
                    "resumed_s": _round(t.resumed_s), "replay_s": _round(t.replay_s), "own_s": _round(t.own_s),
                    "steps_lost": t.steps_lost, "action": t.action, "verdict": t.verdict,
                }
                for t in self.incidents
            ],
            "attempts": self.attempts,
            "ettr": round(self.ettr, 4),
            "cold_start_s": _round(self.cold_start_s),
            "script_bug": self.script_bug,
            "report": self.report,
            "seconds": _round(self.seconds),
            "held": self.held,
            "problems": self.problems,
        }  # fmt: skip


def plan(seed: int, steps: int, kinds: tuple[str, ...] = KINDS) -> list[Planned]:
    """The faults in random order at random steps, one in each of as many windows; the same for the same seed."""
    rng = random.Random(seed)
    order = list(kinds)
    rng.shuffle(order)
    first, last = max(2, steps // 10), steps - max(3, steps // 10)
    window = (last - first) / max(1, len(order))
    planned = []
    for i, kind in enumerate(order):
        # The end of each window stays free, so that a fault never meets the recovery from the one before.
        step = first + int(window * (i + rng.random() * (1 - _WINDOW_FREE)))
        planned.append(Planned(kind, step, rng.random()))
    return planned


class Command:
    """`unbroken run` as a child of its own; its lines go to `on_line`."""

    def __init__(
        self, run_dir: Path, options: list[str], script: list[str], cwd: Path, on_line: Callable[[str], None]
    ):
        self._argv = [
            sys.executable,
            "-m",
            "unbroken",
            "run",
            "--run-dir",
            str(run_dir),
            *options,
            "--",
            *script,
        ]
        self._cwd, self._on_line = cwd, on_line
        self.process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._argv, cwd=self._cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True, env=_environment(),
        )  # fmt: skip
        reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, process: subprocess.Popen[str]) -> None:
        if process.stdout is not None:
            for line in process.stdout:
                self._on_line(line.rstrip("\n"))

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait(self, within: float) -> int:
        """The exit code. Raises RunError when it does not end in time."""
        if self.process is None:
            raise RunError("the command was not started")
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise RunError(f"the run did not end within {within:.0f} s") from None
        for reader in self._readers:
            reader.join(5)
        return code

    def end(self) -> None:
        """Asks for a stop, then kills: nothing may stay after the scenario."""
        if self.running and self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()


def _environment() -> dict[str, str]:
    """This environment, with the package found from any folder also in a source checkout (PYTHONPATH=src)."""
    here = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{before}" if before else here}


@dataclass(frozen=True)
class ScenarioSize:
    """How large the scenario is."""

    steps: int = 160
    nodes: int = 2
    nproc: int = 2
    spares: int = 1
    hang_after: str = "8s"
    train: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc

    def options(self, spares: int) -> list[str]:
        return [
            "--nodes", str(self.nodes), "--nproc", str(self.nproc), "--spares", str(spares),
            "--hang-after", self.hang_after,
        ]  # fmt: skip

    def script(self, step_digests: Path) -> list[str]:
        return ["-m", "unbroken.train", *self._arguments(step_digests)]

    def _arguments(self, step_digests: Path) -> list[str]:
        return ["--steps", str(self.steps), "--log-every", "10", "--trace", str(step_digests), *self.train]

    def buggy(self, script: Path, step_digests: Path) -> list[str]:
        return [str(script), *self._arguments(step_digests)]


BUG = '''"""The same training with a bug in it: a key that is not there, met at step 12 by every rank."""

import sys

from unbroken.train import trainer
from unbroken.train.command import main

schedule = {"warmup_steps": 20}
right_learning_rate = trainer.learning_rate


def learning_rate(config, step, steps):
    if step >= 12:
        schedule["warm_up_steps"]  # the bug
    return right_learning_rate(config, step, steps)


trainer.learning_rate = learning_rate
sys.exit(main())
'''


def tell(
    folder: Path,
    *,
    seed: int,
    shape: ScenarioSize | None = None,
    kinds: tuple[str, ...] = KINDS,
    say: Callable[[str], None],
    bug: bool = True,
    limit_s: float = 280.0,
) -> Scenario:
    """Runs the whole scenario in `folder` (which must be empty or absent) and returns what was seen.

    Nothing is left running, whatever happens. Raises RunError when a run does not even end.
    """
    shape = shape or ScenarioSize()
    scenario = Scenario(seed, shape.steps)
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    commands: list[Command] = []

    def left() -> float:
        return max(10.0, limit_s - (time.monotonic() - began))

    def command(name: str, options: list[str], script: list[str]) -> Command:
        c = Command(folder / name, options, script, folder, lambda line: say(f"  {line}"))
        commands.append(c)
        return c

    try:
        say(
            f"1. the reference: {shape.world_size} ranks on {shape.nodes} nodes, {shape.steps} steps, no faults"
        )
        reference = command(
            "reference", shape.options(0), shape.script(folder / "step-digests" / "reference-{rank}.jsonl")
        )
        reference.start()
        if reference.wait(left()) != 0:
            raise RunError("the reference run did not complete", where=str(folder / "reference"))

        planned = plan(seed, shape.steps, kinds)
        say("")
        say(
            f"2. the same run with faults (seed {seed}): "
            + ", ".join(f"{p.kind} after step {p.step}" for p in planned)
        )
        faulted = command(
            "run", shape.options(shape.spares), shape.script(folder / "step-digests" / "run-{rank}.jsonl")
        )
        faulted.start()
        for fault in planned:
            scenario.incidents.append(_inject(folder / "run", faulted, fault, say, left()))
        _expect(scenario, faulted.wait(left()) == 0, "the run with faults did not complete")
        _compare(scenario, folder, shape)
        _measure(scenario, RunDir(folder / "run"))

        if bug:
            say("")
            say("3. a copy of the run with a bug in the script: it must stop at once")
            script = folder / "train_with_bug.py"
            script.write_text(BUG)
            buggy = command(
                "bug", shape.options(0), shape.buggy(script, folder / "step-digests" / "bug-{rank}.jsonl")
            )
            buggy.start()
            _judge_bug(scenario, RunDir(folder / "bug"), buggy.wait(left()))
    finally:
        for c in commands:
            c.end()
        for name in ("reference", "run", "bug"):
            if (folder / name / "run.toml").exists():
                _expect_nothing_left(scenario, RunDir(folder / name))
    scenario.seconds = time.monotonic() - began
    return scenario


def _expect(scenario: Scenario, held: bool, problem: str) -> None:
    if not held:
        scenario.problems.append(problem)


def _inject(
    run_dir: Path, command: Command, fault: Planned, say: Callable[[str], None], within: float
) -> InjectedFault:
    _wait(lambda: (run_dir / "run.toml").exists() or not command.running, within, "the run did not start")
    if not command.running:
        raise RunError("the run ended before the first fault", where=str(run_dir))
    faults = RunFaults(RunDir(run_dir))
    faults.wait_for_step(fault.step, within=within, alive=lambda: command.running)
    ranks, nodes = faults.ranks(), faults.nodes()
    attempt, step = faults.step()
    rank = sorted(ranks)[int(fault.target * len(ranks))]
    node = nodes[int(fault.target * len(nodes))]
    # From before the blow: a node's end takes a while on a busy machine, and its loss may be noticed meanwhile.
    injected_fault = InjectedFault(fault.kind, step, time.time(), what=WHAT[fault.kind])
    if fault.kind == "kill_rank":
        say(f"  >>> kill -9 of rank {rank} at step {step}")
        faults.kill_rank(rank)
    elif fault.kind == "stop_rank":
        say(f"  >>> SIGSTOP of rank {rank} at step {step}")
        faults.stop_rank(rank)
    elif fault.kind == "kill_node":
        say(f"  >>> kill -9 of everything on {node} at step {step}, its memory and scratch are gone")
        faults.kill_node(node)
    else:
        say(f"  >>> kill -9 of the supervisor at step {step}; then the same command again")
        faults.kill_supervisor()
        command.wait(10)
        command.start()
    if fault.kind == "kill_supervisor":
        # The ranks need not stop: the run is whole again once somebody supervises it.
        _wait(lambda: _supervised_since(run_dir, injected_fault.injected), within, "nobody took the run over")
        injected_fault.resumed_s = time.time() - injected_fault.injected
        injected_fault.steps_lost = 0 if faults.step()[0] == attempt else None
        return injected_fault
    _wait(lambda: _past(faults, attempt, step) or not command.running, within, "the run did not come back")
    injected_fault.resumed_s = time.time() - injected_fault.injected
    return injected_fault


def _past(faults: RunFaults, attempt: int, step: int) -> bool:
    now_attempt, now_step = faults.step()
    return now_attempt > attempt and now_step > step


def _supervised_since(run_dir: Path, when: float) -> bool:
    return any(
        r["kind"] in ("adopted", "attempt") and r["t"] > when for r in read_journal(RunDir(run_dir)).records
    )


def _wait(condition: Callable[[], bool], within: float, problem: str) -> None:
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise RunError(f"{problem} within {within:.0f} s")
        time.sleep(0.005)


def _compare(scenario: Scenario, folder: Path, shape: ScenarioSize) -> None:
    """Every rank's losses, batches and final state, bit for bit."""
    scenario.identical = True
    for rank in range(shape.world_size):
        a = read_step_digests(folder / "step-digests" / f"reference-{rank}.jsonl")
        b = read_step_digests(folder / "step-digests" / f"run-{rank}.jsonl")
        whole = len(a.losses) == shape.steps and a.parameters is not None
        if not whole or not a.same_as(b):
            scenario.identical = False
            scenario.difference = f"rank {rank}: {a.difference(b) or 'the reference is not whole'}"
            scenario.problems.append(f"the run differs from the reference: {scenario.difference}")
            break
        scenario.reference_loss, scenario.final_loss = a.losses[shape.steps], b.losses[shape.steps]


def _measure(scenario: Scenario, run_dir: RunDir) -> None:
    """Takes detection, verdicts and lost steps from what the run left."""
    journal = read_journal(run_dir).records
    scenario.attempts = max(r["attempt"] for r in journal if r["kind"] == "attempt")
    scenario.cold_start_s = statistics.median(r["seconds"] for r in journal if r["kind"] == "first_step")
    scenario.ettr = gather(run_dir).ettr or 0.0
    incidents = read_incidents(run_dir)
    for injected_fault in scenario.incidents:
        found = next((i for i in incidents if i["detected"] >= injected_fault.injected), None)
        if found is None:
            scenario.problems.append(
                f"{injected_fault.kind} at step {injected_fault.at_step} left no incident"
            )
            continue
        incidents.remove(found)
        injected_fault.detected_s = max(0.0, found["detected"] - injected_fault.injected)
        injected_fault.verdict, injected_fault.action = found["verdict"], found["action"]
        if found["steps_lost"] is not None:
            injected_fault.steps_lost = found["steps_lost"]
        phases = found["phases"]
        injected_fault.replay_s = phases.get("replay", 0.0)
        if injected_fault.resumed_s is not None and "start" in phases:
            scripts = phases["start"] + phases["restore_and_first_step"] + injected_fault.replay_s
            injected_fault.own_s = max(0.0, injected_fault.resumed_s - scripts)
    for extra in incidents:
        scenario.problems.append(f"incident {extra['number']} was not injected: {extra['kind']}")


def _judge_bug(scenario: Scenario, run_dir: RunDir, code: int) -> None:
    journal = read_journal(run_dir).records
    attempts = max((r["attempt"] for r in journal if r["kind"] == "attempt"), default=0)
    found = read_incidents(run_dir)
    verdict = found[-1]["verdict"] if found else {}
    stopped = code == 10 and attempts == 1
    scenario.script_bug = {"stopped": stopped, "attempts": attempts, "exit_code": code, "verdict": verdict}
    _expect(
        scenario, stopped, f"the script bug did not stop the run at once (exit {code}, {attempts} attempts)"
    )
    _expect(
        scenario,
        verdict.get("reason") == "KeyError" and verdict.get("action") == "stop",
        f"the script bug was taken for {verdict.get('reason')}",
    )


def _expect_nothing_left(scenario: Scenario, run_dir: RunDir) -> None:
    """Says what a run left behind, and removes it: a scenario that failed must not go on in the background."""
    faults = RunFaults(run_dir)
    left = faults.left_over()
    if left:
        scenario.problems.append(f"{run_dir.path.name} left things behind: {', '.join(left[:5])}")
        faults.end_everything()


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
