"""What every hook does at the end of a step: report it, save it where that is due, stop where that was asked. Needs torch."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Checkpointer, Restored
from ..checkpoint.capture.generators import capture_rng, restore_rng
from ..errors import Exit, MissingExtra, UsageError
from ..progress.attach import attach

logger = logging.getLogger("unbroken.hooks")

_active: list[weakref.ref[HookedTraining]] = []
"""The training that is at work in this process, if one is."""
_kept: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
"""The hooks' own, those of trainings that ended with an exception as well."""


class HookedTraining:
    """One training of this process, kept alive by one checkpointer.

    `state` is filled by the hook and given to `begin`. Raises UsageError where another hook is at work already.
    """

    def __init__(self, framework: str, directory: Any = None, **options: Any) -> None:
        other = next((t for ref in _active if (t := ref()) is not None and not t.ended), None)
        if other is not None:
            raise UsageError(
                f"two hooks at once: {other.framework}'s already saves this training, and {framework}'s would save it again",
                hint="Attach one hook, once, to the outermost trainer",
            )
        self.framework: str = framework
        self.run = attach()
        self.checkpoints = Checkpointer(directory, **options)
        _kept.add(self.checkpoints)
        self.state: dict[str, Any] = {}
        self.restored: Restored | None = None
        self.step = 0
        """Complete steps, over all attempts."""
        self.loss = Loss()
        self.before_save: Callable[[], object] = _nothing
        self.ended: bool = False
        self._generators: dict[str, Any] | None = None
        _active[:] = [weakref.ref(self)]

    def begin(self, state: dict[str, Any]) -> Restored | None:
        """Restores `state`, which is saved from now on; to be called once everything in it has been built. Raises UsageError where this
        training is over already, or a Checkpointer of the script's own saves into the same place."""
        if self.ended:
            raise UsageError(
                f"{self.framework}'s training is over: its hook keeps one, and all of it is durable",
                hint="Build another trainer, with a folder of its own, and attach to that",
            )
        if any(c not in _kept for c in self.checkpoints.others_at_work()):
            raise UsageError(
                f"two checkpointers at once: {self.framework}'s hook saves into {self.checkpoints.directory}, and so does an "
                "unbroken.Checkpointer of the script",
                hint="Leave the script's own out: the hook saves and restores all of the training",
            )
        self.state = state
        self.restored = self.checkpoints.restore(state)
        if self.restored is not None:
            self.step = self.restored.step
            self._generators = capture_rng()
            if self.run.rank == 0:
                logger.info("%s goes on after step %d", self.framework, self.step)
        if self.run.should_stop(self.step):
            self._leave()
        return self.restored

    def put_generators_back(self) -> None:
        """After a restore, once the first batch is there: the generators are what was saved. Whatever the framework drew from them while it set up its
        loaders, an undisturbed training did not draw there."""
        if self._generators is not None:
            restore_rng(self._generators)
            self._generators = None

    def end_step(self, step: int) -> None:
        """Step `step` is complete, with all that the framework does after it. Exits where a stop at it was asked for."""
        self.step = step
        self.run.step(step, loss=self.loss.read())
        if self.run.should_stop(step):
            self.before_save()
            self.checkpoints.save(step, self.state, persist=True)
            self._leave()
        if self.checkpoints.due(step):
            self.before_save()
            self.checkpoints.save(step, self.state)

    def finish(self) -> None:
        """Waits until everything is durable. Raises NotDurable. What the script does after its training (save a model, send it away)
        has no steps, and is no hang."""
        if not self.ended:
            self.ended = True
            self.run.phase("stopping")
            self.checkpoints.close()

    def _leave(self) -> None:
        """Ends this process as one that was asked to: a framework's `train()` would return as if all were done."""
        self.finish()
        atexit.register(
            _leave_group
        )  # at the very end: a framework may want to speak to the others while it is torn down
        raise SystemExit(Exit.RANK_STOPPED_ON_REQUEST)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """As `Run.phase`."""
        with self.run.phase(name):
            yield

    def during(self, owner: Any, method: str, phase: str) -> None:
        """Makes a method of an object say that its time belongs to a phase, so that it is not taken for a hang."""
        original = getattr(owner, method)

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.run.phase(phase):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


class Loss:
    """The loss of a step, read without waiting for a GPU: there it is the newest that has arrived."""

    def __init__(self) -> None:
        self._value: Any = float("nan")
        self._host: torch.Tensor | None = None
        self._event: Any = None
        self._arrived = float("nan")

    def note(self, loss: Any) -> None:
        """The loss of the present step: a number, or a tensor with one element; anything else is none."""
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                return
            loss = loss.detach()
        self._value = loss

    def noted(self) -> Any:
        """What was noted last, as it was given."""
        return self._value

    def read(self) -> float:
        """The loss as far as it is known now; NaN where it is not."""
        value = self._value
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            try:
                return float(value)
            except (TypeError, ValueError):
                return float("nan")
        if self._event is None or self._event.query():
            if self._event is not None and self._host is not None:
                self._arrived = float(self._host)
            if self._host is None:
                self._host = torch.zeros((), dtype=torch.float32, pin_memory=True)
            self._host.copy_(value.reshape(()), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        return self._arrived


class Values:
    """Plain values of a framework's object, in a state: read by one function, put back by another."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get, self._put = get, put

    def state_dict(self) -> dict[str, Any]:
        """What the first function gives."""
        return {"values": self._get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives it to the second."""
        self._put(state["values"])


def folder_of(directory: str | Path | None, parent: str | Path | None) -> str | Path | None:
    """Where a hook's checkpoints lie: as given, else in the run's own folder, else in `unbroken` below the framework's."""
    if directory is not None or parent is None or os.environ.get("UNBROKEN_RUN_DIR"):
        return directory
    return Path(parent) / "unbroken"


def check_version(library: str, least: str, extra: str) -> None:
    """Raises MissingExtra where a framework is not installed, UsageError where it is older than `least`."""
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError:
        raise MissingExtra(library, extra, what=f"the hook of {library}") from None
    if _numbers(found) < _numbers(least):
        from ..extras import install_command

        raise UsageError(
            f"{library} {found} is too old for its hook, which needs {least}",
            hint=f"Install a newer one: {install_command(extra)}",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2])


def _nothing() -> None:
    return None


def _leave_group() -> None:
    """gloo may abort a process that ends without."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
