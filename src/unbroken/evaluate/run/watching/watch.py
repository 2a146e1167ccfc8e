"""Every committed checkpoint of a run, evaluated as it appears: pin, export, evaluate, compare, release.

OUT/curve.jsonl has one checksummed line per checkpoint; OUT/curves.txt and OUT/curves.html are made from it. A checkpoint
is pinned before it is touched, so that retention leaves it; the pin is renewed while the evaluation runs and ends
with it, or by itself `PIN_S` after a crash. Those that wait for their turn are held (hold.py). Prompts and answers are shared by all checkpoints under OUT.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .... import atomic
from ....checkpoint.catalogue.contents import Found, listing
from ....checkpoint.catalogue.retention import pin_checkpoint, unpin_checkpoint
from ....checkpoint.storage import open_storage
from ....checkpoint.storage.base import Storage
from ....errors import (
    CheckpointCorrupt,
    CheckpointTooNew,
    DatasetMissing,
    EvaluationIncomplete,
    InputError,
    LayoutMismatch,
    MissingExtra,
    ModelDoesNotLoad,
    NoCheckpoint,
    RunInterrupted,
    UnbrokenError,
    UnknownTask,
    UsageError,
)
from ....journal import lines
from ....journal.codec import decode, encode
from ....page.shell import write_beside
from ....progress import RunDir, newest_place
from ....progress.records.candidate import parse_folder_name
from ...contracts import ModelSpec, Report, Suite
from ...result.folder import EvalDir, read_json
from ...result.results import Difference, compare
from .curves import CurvePoint, curves_page, curves_text
from .hold import Holding

PIN_S = 3600.0
TRIES = 2
"""A checkpoint whose evaluation failed so often in one command is passed over, and said to be."""
LASTING = (
    ModelDoesNotLoad,
    UsageError,
    UnknownTask,
    DatasetMissing,
    InputError,
    MissingExtra,
    CheckpointCorrupt,
    CheckpointTooNew,
    LayoutMismatch,
)
"""What another try a moment later would meet again."""
WAIT_S = 0.2
"""Between looks for the folder: a checkpoint takes longer to be written, and is held before it can be superseded."""
LOAD_FOLDERS = ("transformers", "vllm", "sglang")
"""Backends that load a folder of Hugging Face and nothing else."""
GONE = "removed before it could be pinned"
OURS = ("evaluations", "watchers")
"""What a folder of checkpoints may hold before the first of them."""

Evaluate = Callable[[Suite, ModelSpec, EvalDir], Report]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Watch:
    """What to watch, and how."""

    suite: Suite
    spec: ModelSpec
    """`source` is filled in for each checkpoint."""
    out: Path
    like: Path | None = None
    """A Hugging Face folder with the configuration and tokenizer: each checkpoint is exported to its layout."""
    prefix: str | None = None
    """Part of the state that is the model; None: found by its name."""
    poll_s: float = 10.0
    once: bool = False
    """Evaluate what is there, then return."""
    last_step: int | None = None
    """Return after the checkpoint of this step, or a later one."""
    newest_only: bool = False
    """Evaluate only the newest: pass over what was superseded while an evaluation ran, or before it began."""
    hold: int = 0
    """So many checkpoints are kept from removal until their turn comes, the newest; 0: every one."""
    holder: str = field(default="")

    @property
    def pin_name(self) -> str:
        """Who holds the pin."""
        return self.holder or f"eval-{self.suite.name}"[:100]


def checkpoints_of(run: str) -> Storage:
    """The checkpoints of a run directory, or a folder or bucket of checkpoints. Raises InputError if it is neither.

    A run directory may have none yet, and a folder that is empty: the first commit is waited for. A folder of another
    kind must hold one, or one that is being written.
    """
    if "://" in run:
        return open_storage(run)
    path = Path(run)
    if not path.is_dir():
        raise InputError(
            "this is a file, no run directory" if path.exists() else "there is no such run directory",
            where=run,
            hint="Give the --run-dir of `unbroken run`, or a folder of checkpoints",
        )
    inside = RunDir(path)
    if inside.checkpoints.is_dir() or inside.spec.is_file():
        return open_storage(newest_place(inside))
    storage = open_storage(path)
    of_a_run = RunDir(path.absolute().parent).checkpoints == path.absolute()
    if not of_a_run and _names(path) and not any(parse_folder_name(n) for n in storage.folders()):
        raise InputError(
            "this is no run directory, and it holds no checkpoints",
            where=run,
            hint="Give the --run-dir of `unbroken run`, or a folder of checkpoints",
        )
    return storage


def wait_for_checkpoints(run: str, say: Say, *, stop: Callable[[], bool] = lambda: False) -> Storage:
    """As `checkpoints_of`, once a run directory or a checkpoint is there: the training may make the folder later.

    Of a folder that is missing or empty nobody knows yet whether it becomes a run directory or a folder of checkpoints,
    so nothing is written there before. Raises InputError where there is a file, a folder of another kind, or, with `stop`,
    nothing at the end.
    """
    path, said = Path(run), ""
    began_empty = "://" not in run and not (path.exists() and _names(path))
    while began_empty and not stop():
        if path.exists() and not path.is_dir():
            break  # a file: refused below
        if _decided(path):
            break
        now = (
            "there is no folder {} yet; waiting for it"
            if not path.is_dir()
            else "no checkpoint is in {} yet; waiting for the first"
        )
        if now != said:
            say(now.format(run))
            said = now
        time.sleep(WAIT_S)
    return checkpoints_of(run)


def _decided(path: Path) -> bool:
    """Whether the folder shows what it is."""
    inside = RunDir(path)
    if inside.checkpoints.is_dir() or inside.spec.is_file():
        return True
    if RunDir(path.absolute().parent).checkpoints == path.absolute() and path.is_dir():
        return True
    return any(parse_folder_name(n) for n in _names(path))


def _names(path: Path) -> list[str]:
    try:
        return [e.name for e in path.iterdir() if not e.name.startswith(".") and e.name not in OURS]
    except OSError:
        return []


def refuse_unlike(asked: Watch) -> None:
    """Raises UsageError where --like is no folder of a model."""
    if asked.like is not None and not (asked.like / "config.json").is_file():
        raise UsageError(
            "--like names a folder without a config.json"
            if asked.like.is_dir()
            else "--like names no folder",
            where=str(asked.like),
            hint="Give the folder of a Hugging Face model of the same architecture",
        )


def refuse_unloadable(asked: Watch, storage: Storage) -> None:
    """Raises UsageError where no checkpoint could ever be loaded; reads a little, and writes nothing."""
    refuse_unlike(asked)
    if asked.like is not None:
        return
    if asked.spec.backend not in LOAD_FOLDERS:
        return  # another backend may load a checkpoint as it is
    there = [f.name for f in listing(storage, quick=True) if f.committed]
    if there and _says_its_form(storage, there[0]):
        return
    if there and not any(e.name == "config.json" for name in there for e in storage.files(name)):
        raise UsageError(
            "the checkpoints hold no config.json, and no --like is given",
            where=f"{storage.url}/{there[0]}".removeprefix("file://"),
            hint="Give --like, the folder of a Hugging Face model of the same architecture",
        )


def watch(
    asked: Watch, storage: Storage, evaluate: Evaluate, say: Say, *, stop: Callable[[], bool] = lambda: False
) -> list[CurvePoint]:
    """Evaluates each committed checkpoint once, oldest first; returns the curve. Ends by `once`, `last_step` or `stop`.

    What failed in an earlier command is tried again. Raises EvaluationInUse where another one watches into this folder.
    """
    with EvalDir(asked.out).lock():
        holding = Holding(storage, asked.pin_name, lambda: listing(storage, quick=True), say,
                          most=1 if asked.newest_only else asked.hold, every_s=asked.poll_s)  # fmt: skip
        try:
            return _watch(asked, storage, evaluate, say, stop, holding)
        finally:
            waited = holding.end()
            if waited and not asked.newest_only:
                say(f"not evaluated yet, and not kept from removal any longer: {', '.join(waited)}")


def _watch(
    asked: Watch, storage: Storage, evaluate: Evaluate, say: Say, stop: Callable[[], bool], holding: Holding
) -> list[CurvePoint]:
    points = {p.name: replace(p, tries=0) if p.code else p for p in read_curve(asked.out)}
    holding.start([n for n, p in points.items() if not _is_open(p)])
    while True:
        holding.poll()
        for lost, why in holding.lost():
            if lost.name not in points and not asked.newest_only:
                say(f"{lost.name}: not evaluated: {why}")
                points[lost.name] = CurvePoint(
                    lost.name, lost.step, lost.attempt, time.time(), failed=why, tries=TRIES
                )
                _append(asked.out, points[lost.name])
                _draw(asked)
        there = listing(storage, quick=True)
        waiting = _waiting(asked, there, points)
        for found in waiting[:1]:
            point = _one(asked, storage, found, points.get(found.name), evaluate, say)
            _append(asked.out, point)
            points[point.name] = point
            if not _is_open(point):
                holding.done(point.name)
            _draw(asked)
        names = {f.name for f in there}
        done = [p for p in points.values() if not _is_open(p) or p.name not in names]
        if stop() or (asked.last_step is not None and any(p.step >= asked.last_step for p in done)):
            return read_curve(asked.out)
        if not waiting:
            if asked.once:
                return read_curve(asked.out)
            _pause(asked.poll_s, stop)


def _waiting(asked: Watch, found: Sequence[Found], points: Mapping[str, CurvePoint]) -> list[Found]:
    """Committed checkpoints to evaluate, in this order. `found`: newest first, what a later attempt saved before all else."""
    committed = [f for f in found if f.committed]
    if asked.newest_only:
        last = max(((p.attempt, p.step) for p in points.values() if p.failed != GONE), default=(0, -1))
        committed = [f for f in committed[:1] if (f.attempt, f.step) >= last]
    return sorted((f for f in committed if _is_open(points.get(f.name))), key=lambda f: (f.step, f.attempt))


def shortfall(points: Sequence[CurvePoint]) -> tuple[str, int]:
    """What is to be said of the points of one command where some were not evaluated, and its exit code; else ("", 0)."""
    failed = [p for p in points if p.failed and p.code]
    if not failed:
        return "", 0
    first = f"{failed[0].name}: {failed[0].failed}"
    if any(p.scores for p in points):
        return (
            f"{len(failed)} of {len(points)} checkpoints were not evaluated. {first}",
            EvaluationIncomplete.exit_code,
        )
    return f"no checkpoint was evaluated. {first}", failed[0].code


def read_curve(out: Path) -> list[CurvePoint]:
    """The points so far, by step; the last line of each checkpoint counts."""
    found: dict[str, CurvePoint] = {}
    for p in lines.read_as(out / "curve.jsonl", CurvePoint):
        found[p.name] = p
    return sorted(found.values(), key=lambda p: (p.step, p.attempt))


@contextlib.contextmanager
def hold_pin(storage: Storage, name: str, holder: str, seconds: float = PIN_S) -> Iterator[None]:
    """Holds a pin on a checkpoint, renewed in the background. Raises NoCheckpoint if it is gone."""
    pin_checkpoint(storage, name, holder, seconds, "being evaluated")
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(seconds / 3):
            with contextlib.suppress(
                UnbrokenError, OSError
            ):  # the next try comes long before the pin is over
                pin_checkpoint(storage, name, holder, seconds, "being evaluated")

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(UnbrokenError, OSError):  # it ends by itself
            unpin_checkpoint(storage, name, holder)


def _one(
    asked: Watch, storage: Storage, found: Found, before: CurvePoint | None, evaluate: Evaluate, say: Say
) -> CurvePoint:
    tries = before.tries + 1 if before is not None else 1
    say(f"{found.name}: evaluating")
    point = CurvePoint(found.name, found.step, found.attempt, time.time(), tries=tries)
    try:
        with hold_pin(storage, found.name, asked.pin_name), _as_model(asked, storage, found.name) as source:
            report = evaluate(
                asked.suite,
                replace(asked.spec, source=source, name=found.name),
                EvalDir(asked.out / found.name, asked.out),
            )
        if report.errors and not report.scores:
            why = "; ".join(f"{task}: {e}" for task, e in report.errors.items())
            raise EvaluationIncomplete(f"no task has a score: {why}")
    except RunInterrupted:
        raise  # no failure of the checkpoint
    except NoCheckpoint:
        say(f"{found.name}: {GONE}; passed over")
        return replace(point, failed=GONE, tries=TRIES)
    except UnbrokenError as e:
        point = replace(
            point, failed=str(e), code=e.exit_code, tries=TRIES if isinstance(e, LASTING) else tries
        )
        if before is not None and before.failed and tries > 1:
            say(f"{found.name}: passed over after {tries} tries; the first one: {before.failed}")
            return replace(point, failed=before.failed, code=before.code)
        say(f"{found.name}: not evaluated: {e}" + (" It is tried again." if point.tries < TRIES else ""))
        return point
    changes = _against_previous(asked, point, report)
    worse = tuple(d.task for d in changes if d.verdict == "worse")
    for d in changes:
        if d.verdict == "worse":
            say(
                f"{found.name}: REGRESSION in {d.task}: {d.metric} {d.before:.4f} -> {d.after:.4f}, p = {d.p:.2g}"
            )
    say(
        f"{found.name}: "
        + ", ".join(
            f"{s.task} {s.metrics[0].value:.4f}" for s in (report.groups or report.scores) if s.metrics
        )
    )
    slim = tuple(replace(s, notes=(), per_sample=(), values={}) for s in (*report.scores, *report.groups))
    return replace(point, scores=slim, worse=worse)


def _against_previous(asked: Watch, point: CurvePoint, report: Report) -> list[Difference]:
    earlier = [p for p in read_curve(asked.out) if not p.failed and p.step < point.step]
    if not earlier:
        return []
    path = EvalDir(asked.out / earlier[-1].name).report
    old = decode(Report, read_json(path)).scores if path.exists() else earlier[-1].scores
    return compare(old, report.scores)


@contextlib.contextmanager
def _as_model(asked: Watch, storage: Storage, name: str) -> Iterator[str]:
    """The checkpoint as something that a backend loads: exported to Hugging Face's layout, or as it is."""
    if asked.like is None and not (asked.spec.backend in LOAD_FOLDERS and _says_its_form(storage, name)):
        yield f"{storage.url}/{name}".removeprefix("file://")
        return
    from ....checkpoint.convert.export import to_huggingface  # needs torch

    target = asked.out / "models" / name
    if target.exists():
        shutil.rmtree(target)  # of an evaluation that was cut short
    target.parent.mkdir(parents=True, exist_ok=True)
    to_huggingface(storage, name, target, prefix=asked.prefix, beside=asked.like)
    try:
        yield str(target)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _says_its_form(storage: Storage, name: str) -> bool:
    """Whether the checkpoint itself says how Hugging Face calls its tensors, as those of `unbroken train` do."""
    from ....checkpoint.catalogue.contents import read_committed
    from ....checkpoint.convert.export import huggingface_of  # needs torch

    return huggingface_of(read_committed(storage, name)) is not None


def _is_open(point: CurvePoint | None) -> bool:
    return point is None or (bool(point.failed) and point.tries < TRIES)


def _append(out: Path, point: CurvePoint) -> None:
    file = lines.Appender(out / "curve.jsonl")
    try:
        file.append(encode(point), durable=True)
    finally:
        file.close()


def _pause(seconds: float, stop: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stop():
        time.sleep(min(0.2, seconds))


def _draw(asked: Watch) -> None:
    points = read_curve(asked.out)
    atomic.write_text(asked.out / "curves.txt", curves_text(points))
    write_beside(asked.out / "curves.html", lambda: curves_page(asked.suite.name, points))
