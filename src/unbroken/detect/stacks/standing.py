"""What a rank is doing, from the frames and states of its processes and from the phase that it is in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...progress import Phase
from .process import STATES, ChildInfo, ProcessInfo


class Doing(StrEnum):
    """What a rank does while the others wait, or that it waits with them."""

    COLLECTIVE = "waits in a collective"
    FINISHED = "has finished"
    KERNEL = "is stuck in the kernel"
    STOPPED = "is stopped"
    DEAD = "is dead"
    LOCK_HELD = "sleeps and holds the interpreter's lock"
    LOADER = "waits for its data loader"
    CHECKPOINT = "saves a checkpoint"
    EVALUATION = "evaluates"
    CHILD = "waits for a process that it started"
    LOCK = "waits for a lock of its own"
    DEVICE = "waits for its GPU"
    CODE = "runs its own code"
    UNKNOWN = "is not known"


@dataclass(frozen=True)
class Standing:
    """One rank: `op` is the collective that it waits in, `site` the line of the script from which it came there (or where it
    is else), `detail` what more is known, in words."""

    rank: int
    doing: Doing
    op: str = ""
    site: str = ""
    detail: str = ""

    def describe(self) -> str:
        """`waits for its data loader (process 41 ..., stopped by a signal) at train (train.py:22)`."""
        what = f"waits in {self.op}" if self.op else str(self.doing)
        return f"{what}{f' ({self.detail})' if self.detail else ''}{f' at {self.site}' if self.site else ''}"


_COLLECTIVE_CALL = re.compile(
    r"^_?(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|(?:monitored_)?barrier|scatter|gather|reduce"
    r"|isend|irecv|send|recv)\w* \(.*\bdistributed\b",
    re.IGNORECASE,
)
_COLLECTIVES = re.compile(
    _COLLECTIVE_CALL.pattern
    + r"|[/ (]torch/distributed/|distributed_c10d|^_engine_run_backward |\bnccl|\bgloo",
    re.IGNORECASE,
)
_BACKWARD = re.compile(r"^_engine_run_backward ")
_LOADER = re.compile(
    r"torch/utils/data/|^_?(?:next_data|try_get_data|get_batch|load_batch)\w* ", re.IGNORECASE
)
_QUEUE = re.compile(r"multiprocessing/(?:queues|connection|synchronize)\.py")
_SAVING = re.compile(
    r"torch/serialization|safetensors|torch/distributed/checkpoint|^_?(?:save|write|dump|flush)\w* \(|^\w*checkpoint\w* \(",
    re.IGNORECASE,
)
_EVALUATING = re.compile(r"^_?(?:eval|valid|test_loss)\w* \(|lm_eval/", re.IGNORECASE)
_CHILD_WAIT = re.compile(
    r"^(?:_?wait|_try_wait|communicate|_communicate|poll|join) \((?:subprocess|multiprocessing/)"
)
_LOCK_WAIT = re.compile(r"\((?:threading|queue|concurrent/futures/\w+|asyncio/\w+)\.py")
_GPU_WAIT = re.compile(
    r"^(?:synchronize|item|_local_scalar_dense|cpu|to|wait_event) \(.*torch/cuda|^synchronize \(torch/"
)
_LOOKED_AT = 12


def in_collective(frames: Sequence[str]) -> bool:
    """Whether a process waits for the other ranks, as its innermost frames tell ('function (file:line)').

    A backward pass counts: gradients are reduced inside it.
    """
    return any(_COLLECTIVES.search(f) for f in frames[:_LOOKED_AT])


def find_standing(rank: int, process: ProcessInfo | None, phase: Phase, finished: bool) -> Standing:
    """What one rank is doing. `finished` says that it ended with exit code 0; `process` is None where nobody looked."""
    if finished:
        return Standing(rank, Doing.FINISHED)
    if process is None:
        return Standing(rank, Doing.UNKNOWN)
    frames, site = process.frames[:_LOOKED_AT], process.site
    if process.state in ("Z", "X", "?"):
        return Standing(rank, Doing.DEAD, detail=STATES.get(process.state, "gone"))
    if process.state in ("T", "t"):
        return Standing(rank, Doing.STOPPED, site=site, detail=STATES[process.state])
    if process.state == "D":
        waits = f", in {process.wchan}" if process.wchan else ""
        return Standing(rank, Doing.KERNEL, site=site, detail=f"{STATES['D']}{waits}")
    if process.gil and not in_collective(process.gil):
        held = f"in C code called by {process.gil[0]}"
        doing = _find_doing(frames, phase, bool(process.children))
        if doing in (Doing.CHECKPOINT, Doing.EVALUATION, Doing.LOADER):
            return Standing(
                rank, doing, site=site, detail=f"sleeps {held}, which holds the interpreter's lock"
            )
        return Standing(rank, Doing.LOCK_HELD, site=site, detail=held)
    if in_collective(frames):
        return Standing(rank, Doing.COLLECTIVE, op=_name_collective(frames), site=site)
    child = _find_child(process.children)
    detail = child.describe() if child is not None else ""
    doing = _find_doing(frames, phase, bool(process.children))
    if doing is Doing.CODE and process.busy is not None:
        detail = "uses a processor" if process.busy else "uses no processor"
    if doing in (Doing.LOCK, Doing.DEVICE):
        detail = ""
    return Standing(rank, doing, site=site or (frames[0] if frames else ""), detail=detail)


def _find_doing(frames: Sequence[str], phase: Phase, has_children: bool) -> Doing:
    def seen(words: re.Pattern[str]) -> bool:
        return any(words.search(f) for f in frames)

    if seen(_LOADER):
        return Doing.LOADER
    if phase is Phase.CHECKPOINTING or seen(_SAVING):
        return Doing.CHECKPOINT
    if phase is Phase.EVALUATING or seen(_EVALUATING):
        return Doing.EVALUATION
    if has_children and seen(_QUEUE):
        return Doing.LOADER
    if seen(_CHILD_WAIT):
        return Doing.CHILD
    if seen(_GPU_WAIT):
        return Doing.DEVICE
    if frames and _LOCK_WAIT.search(frames[0]):
        return Doing.LOCK
    return Doing.CODE if frames else Doing.UNKNOWN


def _find_child(children: Sequence[ChildInfo]) -> ChildInfo | None:
    """The child that is waited for, most likely: one that cannot run, else one that does something of its own."""
    mine = [c for c in children if "resource_tracker" not in " ".join(c.frames)]
    stuck = [c for c in mine if c.cannot_run]
    # A worker with nothing to do waits for its queue.
    at_work = [c for c in mine if c.frames and not any(_QUEUE.search(f) for f in c.frames[:4])]
    return next(iter([*stuck, *at_work, *(c for c in mine if not c.frames)]), None)


def _name_collective(frames: Sequence[str]) -> str:
    """The collective as torch calls it; of a backward pass what it does there."""
    for frame in frames:
        if found := _COLLECTIVE_CALL.search(frame):
            return found[1]
        if _BACKWARD.search(frame):
            return "the gradients of backward"
    return frames[0].split(" (")[0]
