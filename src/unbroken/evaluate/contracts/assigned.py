"""Who answers what: shards, what each worker did with them, and the workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Some whole blocks of one task, for one worker."""

    task: str
    blocks: tuple[int, ...]
    expected_s: float = 0.0
    """Inference on one worker, without load and switch."""
    gpus: int = 1


@dataclass(frozen=True)
class Assignment:
    """What one worker did of one shard: a bar of the Gantt chart."""

    task: str
    worker: str
    blocks: tuple[int, ...]
    """Those that were answered in it."""
    started: float
    ended: float
    busy_s: float
    """Time inside `Harness.run`; the rest is switching and waiting."""
    outcome: str = "done"
    """'done', 'shared' (its tail went to another worker), 'lost' (the worker died), 'failed'."""
    why: str = ""
    expected_s: float = 0.0
    tokens_read: int = 0
    tokens_made: int = 0
    """Of requests, and generated; 0 where the model does not count them."""


@dataclass(frozen=True)
class WorkerSeen:
    """One worker from its start to its end, with what it spent before its first assignment."""

    name: str
    node: str
    gpus: tuple[int, ...]
    started: float
    fetch_s: float = 0.0
    load_s: float = 0.0
    ready: float = 0.0
    ended: float = 0.0
    why: str = ""
    start_s: float = 0.0
    """From `started` until it had connected: what was left of its imports, and of making its devices ready."""
    uncompiled: int = 0
    """Modules that it imported without compiled bytecode, and that every other start will have to compile too."""
    energy_j: float | None = None
    """What its GPUs took from its start to its end, by their own counters; None where there are none, or it did not say goodbye."""


@dataclass(frozen=True)
class Conditions:
    """What may move a score's last digits, recorded beside it."""

    engine: str
    """Backend and version, such as 'transformers 5.3'."""
    device: str
    dtype: str
    batch_size: int
    padding: str = ""
    """'left', 'right' or 'none'."""
    batch_tokens: int = 0
    """Tokens of a batch at most, where batches are cut by them (then `batch_size` is 0)."""
