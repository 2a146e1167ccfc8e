"""What a rehearsed process leaves behind: one line of JSON a step, on disk before the step is made. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Batch:
    """A batch that a loader gave, or a model was given."""

    source: str
    """loader, or model: the input of the outermost module, where no loader is used."""
    iteration: int
    """Which iteration over the loader in this process, from 0."""
    place: int
    """Which batch of that iteration, from 0."""
    indices: str
    """A digest of the samples' indices, empty where they are not known."""
    content: str
    """A digest of all its bytes."""


@dataclass(frozen=True)
class TracedStep:
    """A training right before an optimizer's step: the state that the step before left, and what this one is made of.

    Of a script whose steps are counted as it reports them: right after a step, with the state that it left.
    """

    number: int
    """Steps of this process before it."""
    optimizer: int
    """Which optimizer, in the order in which they were first used."""
    weights: str
    """By what a resumed process is laid beside it: a digest of the parameters of this optimizer, or the step's number in the report."""
    batches: tuple[Batch, ...] = ()
    """Given since the optimizer's last step."""
    generators: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Numbers and flags of modules, such as a dropout's p."""
    state: dict[str, str] = field(default_factory=dict)
    """Digests by name: parameters, buffers, optimizer, scheduler, copies of the weights."""
    gradients: dict[str, str] = field(default_factory=dict)
    losses: tuple[str, ...] = ()
    """What backward() was called on since the last step."""
    variables: dict[str, str] = field(default_factory=dict)
    """Plain values of the training loop, in words."""
    reported: bool = False
    """Whether the script reported it by `run.step()`, and no optimizer's step was counted."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TracedStep:
        known = {
            **value,
            "batches": tuple(Batch(**b) for b in value["batches"]),
            "losses": tuple(value["losses"]),
        }
        return cls(**known)


@dataclass(frozen=True)
class Save:
    """A checkpoint that the training asked for."""

    step: int
    """Steps of this process before it."""
    seconds: float
    """How long the call held the training up."""
    how: str
    """unbroken, torch.save, safetensors."""
    bytes: int = 0
    """Memory that its snapshots take on the node, or the size of the file."""


@dataclass
class Trace:
    """What one process of one attempt left."""

    rank: int
    attempt: int
    steps: list[TracedStep] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refused: str = ""
    """Why the rehearsal ended the process: it would have written to files that are not the rehearsal's."""
    finished: bool = False
    """It came to the last step that was asked for, or to its own end."""
    uses: dict[str, bool] = field(default_factory=dict)
    """What of unbroken the script was seen to use: attach, Checkpointer, data, should_stop."""


class Writer:
    """Appends to the trace of this process; what it wrote survives kill -9."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.attempt = 1
        while True:
            path = folder / f"rank-{rank:05d}.{self.attempt:04d}.jsonl"
            try:
                self._fd = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
                return
            except FileExistsError:
                self.attempt += 1

    def write(self, kind: str, value: Any) -> None:
        """One line."""
        data = json.dumps(
            {"kind": kind, "value": asdict(value) if hasattr(value, "__dataclass_fields__") else value}
        )
        os.write(self._fd, data.encode() + b"\n")


def read_traces(folder: Path) -> dict[tuple[int, int], Trace]:
    """(rank, attempt) -> its trace. A torn last line is left out."""
    found: dict[tuple[int, int], Trace] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank, attempt = (int(x) for x in path.stem.removeprefix("rank-").split("."))
        trace = found[rank, attempt] = Trace(rank, attempt)
        for line in _lines(path):
            kind, value = line["kind"], line["value"]
            if kind == "step":
                trace.steps.append(TracedStep.from_json(value))
            elif kind == "save":
                trace.saves.append(Save(**value))
            elif kind == "warning":
                if value not in trace.warnings:
                    trace.warnings.append(value)
            elif kind == "refused":
                trace.refused = str(value)
            elif kind == "uses":
                trace.uses.update(value)
            elif kind == "finished":
                trace.finished = True
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n"):
        if line:
            try:
                yield json.loads(line)
            except ValueError:
                return
