"""The rehearsal: the training undisturbed, then killed and resumed, twice; where something differs, experiments that tell why. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from ..errors import RunError, UsageError
from ..units import plural
from .compare import Comparison, FirstDifference, compare
from .launch import Launcher, Supervised, Trial
from .plan import RehearsalPlan
from .trace import Save, Trace, TracedStep, read_traces


@dataclass(frozen=True)
class Kill:
    """One time that the training was killed, and what came of it."""

    before_step: int
    """From 1: it was killed right before this step."""
    rank: int
    epoch: int
    """Which iteration over the loader it was in, from 0."""
    resumed_at: int
    """Steps that it had made where it was taken up."""
    finding: FirstDifference | None

    @property
    def lost(self) -> int:
        """Steps that had to be made again."""
        return self.before_step - 1 - self.resumed_at


@dataclass
class RehearsalReport:
    """What a rehearsal found."""

    steps: int
    """Steps of the undisturbed training that were compared."""
    ranks: int
    deterministic: FirstDifference | None = None
    """The first difference between two undisturbed trainings, if there is one."""
    kills: list[Kill] = field(default_factory=list)
    save_every: int | None = None
    """Steps between two saves; None if none was seen."""
    saved_by: str = ""
    stall_s: float = 0.0
    """How long a save held the training up, on average."""
    snapshot_bytes: int = 0
    """Of the memory of the node that snapshots take, or the size of a checkpoint file."""
    warnings: list[str] = field(default_factory=list)
    """What will be warned of, or is missing."""
    notes: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether every step was made as in the undisturbed training, bit for bit."""
        return self.deterministic is None and bool(self.kills) and all(k.finding is None for k in self.kills)

    @property
    def finding(self) -> FirstDifference | None:
        """The first thing that differs."""
        return self.deterministic or next((k.finding for k in self.kills if k.finding is not None), None)

    def as_json(self) -> dict[str, Any]:
        """The report of `--json`."""
        return {
            **asdict(self),
            "exact": self.exact,
            "finding": asdict(self.finding) if self.finding else None,
        }


@dataclass
class Rehearsal:
    """What is rehearsed, and where. `steps` are compared; `say` hears what happens."""

    command: tuple[str, ...]
    folder: Path
    """An empty folder for all trials."""
    steps: int = 20
    nproc: int = 1
    launcher: Launcher = field(default_factory=Supervised)
    source: Path = field(default_factory=Path.cwd)
    timeout_s: float = 600.0
    say: Callable[[str], None] = lambda text: None
    _count: int = 0

    def run(self) -> RehearsalReport:
        """Raises UsageError for a script that cannot be rehearsed, RunError for one that fails by itself."""
        if self.steps < 4:
            raise UsageError("a rehearsal needs 4 steps or more", hint="Raise --steps")
        self.say(f"the training undisturbed, {plural(self.steps, 'step')}")
        undisturbed = self._trial()
        first = self._whole(undisturbed)
        report = RehearsalReport(len(first[0]) - 1, self.nproc)
        _describe_saves(report, undisturbed)
        others: list[tuple[int, Comparison]] = []
        for kill in kill_points(first[0], undisturbed[0, 1].saves):
            self.say(f"the same, killed before step {kill + 1}, and resumed")
            rank = self.nproc - 1
            traces = self._trial(kill_at=kill, kill_rank=rank, reference=first)
            resumed = self._resumed(traces, kill)
            found = [compare(first[r], resumed[r].steps, r, limit=kill) for r in range(self.nproc)]
            finding = min(
                (c.finding for c in found if c.finding), key=lambda f: (f.step, f.rank), default=None
            )
            # What was not as it should have been before the kill already is no fault of the resume.
            before = [compare(first[r], traces[r, 1].steps, r).finding for r in range(self.nproc)]
            if any(before):
                others.append((kill, next(Comparison(0, b) for b in before if b)))
            report.kills.append(Kill(kill + 1, rank, _epoch(first[0][kill]), found[0].resumed_at, finding))
            # What differs between any two processes says nothing of the resume.
            always = {n for r in range(self.nproc) for n in compare(first[r], traces[r, 1].steps, r).notes}
            for c in found:
                report.notes += [n for n in c.notes if n not in report.notes and n not in always]
            report.warnings += [w for t in traces.values() for w in t.warnings if w not in report.warnings]
        if others or any(k.finding for k in report.kills):
            self._tell_chance_apart(report, first)
        _advise(report, undisturbed)
        return report

    # --- trials

    def _trial(
        self, *, steps: int | None = None, env: Mapping[str, str] | None = None, **plan: Any
    ) -> dict[tuple[int, int], Trace]:
        self._count += 1
        folder = self.folder / f"trial-{self._count:02d}"
        reference = tuple(tuple(s.weights for s in of) for of in plan.pop("reference", ()))
        made = RehearsalPlan(
            str(folder / "trace"), steps or self.steps, protected=str(self.source.absolute()), allowed=str(folder.absolute()),
            reference=reference, **plan,
        )  # fmt: skip
        trial = Trial(folder, self.command, self.source, made, self.nproc, dict(env or {}), self.timeout_s)
        ended = self.launcher.run(trial)
        traces = read_traces(trial.traces)
        if refused := next((t.refused for t in traces.values() if t.refused), ""):
            raise UsageError(refused)
        if not ended.ok:
            raise RunError(
                f"the training failed in the rehearsal:\n{ended.output}", where=str(folder),
                hint="Let it run by itself first: `unbroken run -- ...`",
            )  # fmt: skip
        if not any(t.steps for t in traces.values()):
            raise UsageError(
                "the script made no step of a torch optimizer and reported none, so there is nothing to compare",
                where=" ".join(self.command),
                hint="A script with an update of its own says that a step is complete: unbroken.attach().step(step, loss=loss)",
            )
        return traces

    def _whole(self, traces: dict[tuple[int, int], Trace]) -> list[list[TracedStep]]:
        """The steps of each rank of a training that was not killed."""
        found = [traces[r, 1].steps for r in range(self.nproc) if (r, 1) in traces]
        if len(found) != self.nproc or len({len(f) for f in found}) != 1:
            raise RunError("the ranks made different numbers of steps", where=str(self.folder))
        if len(found[0]) < 4:
            raise UsageError(
                f"the script made {plural(len(found[0]), 'step')} only",
                hint="Let it make 4 or more: it is killed in the middle",
            )
        if any(s.reported and not s.state and not s.losses for f in found for s in f):
            raise UsageError(
                "the script made no step of a torch optimizer; it reports its steps, but neither a loss with them nor weights that "
                "can be found, so there is nothing to compare",
                where=" ".join(self.command),
                hint="Report the loss: unbroken.attach().step(step, loss=loss), and keep the weights in a module or in variables of the loop",
            )  # fmt: skip
        return found

    def _resumed(self, traces: dict[tuple[int, int], Trace], kill: int) -> list[Trace]:
        """The first process of each rank that made a step after the kill."""
        found = []
        for r in range(self.nproc):
            later = [
                t for (rank, attempt), t in sorted(traces.items()) if rank == r and attempt > 1 and t.steps
            ]
            if not later:
                raise RunError(
                    f"rank {r} was killed before step {kill + 1} and made no step after that", where=str(self.folder),
                    hint="Look at its log; if it ended at once, it took itself for finished",
                )  # fmt: skip
            found.append(later[-1])
        return found

    # --- chance

    def _tell_chance_apart(self, report: RehearsalReport, first: list[list[TracedStep]]) -> None:
        """Whether the training is another one each time anyway, and by what."""
        self.say("the training undisturbed once more: is it the same without a kill?")
        again = self._whole(self._trial(reference=first))
        finding = _first_of(first, again)
        if finding is None:
            return
        steps = min(finding.step + 1, self.steps)
        kind, hint, failed = finding.kind, "Look for threads, or kernels that are not deterministic", []
        why = ", whatever the clock, the hash seed and the chance"
        for cause, words, advice, plan, env in _EXPERIMENTS:
            self.say(f"an experiment: {words}")
            # A script may wait for a clock that stands still: what was found before counts all the same.
            try:
                a, b = (self._whole_or_short(self._trial(steps=steps, env=env, **plan)) for _ in range(2))
            except RunError:
                failed.append(words)
                why = f"; the training failed with {' and with '.join(failed)}, so whether that is the cause is open"
                continue
            if _first_of(a, b) is None:
                kind, hint, why = cause, advice, f"; with {words} they do not"
                break
        text = f"two undisturbed trainings differ in the {finding.piece}{why}"
        report.deterministic = replace(finding, kind=kind, text=text, hint=hint)

    def _whole_or_short(self, traces: dict[tuple[int, int], Trace]) -> list[list[TracedStep]]:
        return [traces[r, 1].steps for r in range(self.nproc) if (r, 1) in traces]


_EXPERIMENTS: tuple[tuple[str, str, str, dict[str, Any], dict[str, str]], ...] = (
    ("hash order", "one hash seed (PYTHONHASHSEED)",
     "Sort what comes from a set, or from hash(): its order is another one in each process", {}, {"PYTHONHASHSEED": "0"}),
    ("unseeded", "the chance of the system fixed",
     "Seed every generator from the run's seed; in a dataset, draw from random, numpy.random or torch, which "
     "unbroken.data.wrap seeds for each sample", {"fixed_entropy": True}, {}),
    ("time", "the clock stopped", "Let no sample depend on the time: use the number of the sample or of the step",
     {"frozen_time": True}, {}),
)  # fmt: skip


def _first_of(a: list[list[TracedStep]], b: list[list[TracedStep]]) -> FirstDifference | None:
    found = [compare(x, y, r).finding for r, (x, y) in enumerate(zip(a, b, strict=True))]
    return min((f for f in found if f is not None), key=lambda f: (f.step, f.rank), default=None)


def kill_points(steps: list[TracedStep], saves: list[Save]) -> list[int]:
    """Before which steps the training is killed, from 0: not right at a save, in two epochs where there are two."""
    last = len(steps) - 2  # one step more is compared after it
    saved = sorted({s.step for s in saves if 0 < s.step < last})
    middle = len(steps) // 2

    def after(save: int) -> int:
        following = next((s for s in saved if s > save), last + 1)
        # Some steps after it, before the next: what comes between is lost, and that is measured.
        return min(save + max(1, min(2, following - save - 1)), last)

    if not saved:
        return [min(middle, last), last]
    candidates = sorted({after(s) for s in saved})
    first = min(candidates, key=lambda k: abs(k - len(steps) // 3))
    late = [k for k in candidates if _epoch(steps[k]) != _epoch(steps[first])] or [
        k for k in candidates if k != first
    ]
    second = min(late, key=lambda k: abs(k - 2 * len(steps) // 3), default=first)
    return [first, second]


def _epoch(step: TracedStep) -> int:
    return max((b.iteration for b in step.batches), default=0)


def _describe_saves(report: RehearsalReport, traces: dict[tuple[int, int], Trace]) -> None:
    saves = traces[0, 1].saves
    # One checkpoint may be several files.
    at = sorted({s.step for s in saves})
    report.warnings += [w for t in traces.values() for w in t.warnings if w not in report.warnings]
    if not at:
        return
    report.save_every = min((b - a for a, b in itertools.pairwise(at)), default=at[0])
    report.saved_by = saves[0].how
    report.stall_s = sum(s.seconds for s in saves) / len(at)
    by_step = [sum(s.bytes for s in saves if s.step == n) for n in at]
    report.snapshot_bytes = max(by_step) if saves[0].how != "unbroken" else max(s.bytes for s in saves)
    report.snapshot_bytes *= report.ranks if saves[0].how == "unbroken" else 1


def _advise(report: RehearsalReport, traces: dict[tuple[int, int], Trace]) -> None:
    uses: dict[str, bool] = {}
    for t in traces.values():
        uses.update(t.uses)
    if report.save_every is None:
        report.warnings.append(
            f"nothing was saved within {plural(report.steps, 'step')}: a failure loses all of them. Save more often, or raise --steps"
        )
    if report.save_every is not None and report.saved_by != "unbroken":
        report.warnings.append(
            "checkpoints are written by the training itself: unbroken.Checkpointer holds nothing up"
        )
    if not uses.get("attach"):
        report.warnings.append(
            "steps are not reported: a hang is found by the log only. Call unbroken.attach().step(step)"
        )
    if not uses.get("should_stop"):
        report.warnings.append(
            "should_stop is not asked: Ctrl-C and SIGTERM end the training without a last checkpoint"
        )


def mean_lost(report: RehearsalReport) -> float:
    """Steps lost by a failure, on average over the kills."""
    return mean(k.lost for k in report.kills) if report.kills else 0.0
