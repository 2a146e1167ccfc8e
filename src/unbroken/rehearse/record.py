"""The recorder inside a rehearsed process. Needs torch."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import dataloader as torchs

from ..data.digest import digest
from .collect import Collector, short, user_frames
from .guard import Guard, fix_entropy, freeze_time
from .reported import is_own, own_step, state_of_trainer
from .trace import Batch, Save, TracedStep, Writer

if TYPE_CHECKING:
    from .plan import RehearsalPlan


class RehearsalRecorder:
    """Writes a `TracedStep` before each step of an optimizer; of our own trainer, and of a script that has no optimizer of torch, at
    each step that is reported by `run.step()`."""

    def __init__(self, plan: RehearsalPlan) -> None:
        self.plan = plan
        self.rank = int(os.environ.get("RANK", "0"))
        self.writer = Writer(Path(plan.trace), self.rank)
        self.pid = os.getpid()
        self.number = 0
        self._optimizers: list[Any] = []
        self._collector = Collector()
        self._batches: list[Batch] = []
        self._losses: list[str] = []
        self._iterations: dict[int, int] = {}
        self._depth = 0
        self._inputs: list[Batch] = []
        self._before: int | None = None
        """How many steps the training had made when this process began."""
        self._uses: dict[str, bool] = {}
        self._held: TracedStep | None = None
        """The first step that was reported, until it is known whether a step of an optimizer follows."""
        self._optimizer_steps = False
        """Whether steps of optimizers are what counts."""

    def here(self) -> bool:
        """Whether this is the process itself, not one that it forked."""
        return os.getpid() == self.pid

    def uses(self, what: str) -> None:
        """Notes that the script uses a part of unbroken."""
        if not self._uses.get(what):
            self._uses[what] = True
            self.writer.write("uses", {what: True})

    # --- hooks

    def batch(self, batch: Batch) -> None:
        """A loader gave it."""
        self._batches.append(batch)

    def loader(self, key: int) -> int:
        """A new iteration over this loader: its number."""
        self._iterations[key] = n = self._iterations.get(key, -1) + 1
        return n

    def enter(self, module: Any, args: Any) -> None:
        """A module is called."""
        outermost = self._depth == 0 and module.training and torch.is_grad_enabled() and self.here()
        if outermost and not is_own():  # of our own trainer the batch itself is known
            given = short([a for a in args if isinstance(a, torch.Tensor | list | tuple | dict)])
            self._inputs.append(Batch("model", 0, len(self._inputs), "", given))
        self._depth += 1

    def leave(self) -> None:
        """It returned."""
        self._depth = max(0, self._depth - 1)

    def loss(self, value: Any) -> None:
        """backward() is called on it."""
        if isinstance(value, torch.Tensor) and value.numel() == 1 and self.here() and not is_own():
            self._losses.append(float(value.detach()).hex())

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is about to change the weights."""
        if not self.here() or is_own():  # a plan's update may take many, or none
            return
        self._held, self._optimizer_steps = None, True
        if not any(o is optimizer for o in self._optimizers):
            self._optimizers.append(optimizer)
        self._took(self._step(optimizer))

    def reported(self, number: int, loss: float) -> None:
        """The script says that a step is complete."""
        if not self.here() or self._optimizer_steps:
            return
        step = self._reported(number, loss)
        if self.number == 0 and self._held is None and not is_own():
            # It may say so before the step of its optimizer, which is what counts then.
            self._held = step
            self._batches, self._losses, self._inputs = [], [], []
            return
        if self._held is not None:
            held, self._held = self._held, None
            self._took(held)
            step = replace(step, number=self.number)
        self._took(step)

    def _took(self, step: TracedStep) -> None:
        self._depth = 0  # an exception may have left modules
        self.writer.write("step", step)
        if self._before is None:
            self._before = self._steps_before(step)
        self._batches, self._losses, self._inputs = [], [], []
        if self.plan.kill_at >= 0 and self.writer.attempt == 1 and self.number == self.plan.kill_at:
            if self.rank == self.plan.kill_rank:
                os.kill(os.getpid(), signal.SIGKILL)
            # The others stop here too, and not in the middle of an update; their supervisor ends them.
            signal.pause()
        if self.number + self._before >= self.plan.steps:
            self.finish()
        self.number += 1

    def _step(self, optimizer: Any) -> TracedStep:
        frames = user_frames()
        state, settings = self._collector.state(frames, self._optimizers)
        weights = [p for g in optimizer.param_groups for p in g["params"]]
        return TracedStep(
            self.number,
            next(i for i, o in enumerate(self._optimizers) if o is optimizer),
            short([p.detach() for p in weights]),
            tuple(self._batches or self._inputs),
            _generators(),
            settings,
            state,
            {str(i): short(p.grad) for i, p in enumerate(weights) if p.grad is not None},
            tuple(self._losses),
            # Folders of the trial are others in each, and no cause of anything.
            {
                k: v.replace(self.plan.allowed or "\0", "")
                for k, v in self._collector.variables(frames).items()
            },
        )

    def _reported(self, number: int, loss: float) -> TracedStep:
        own, frames = own_step(), user_frames()
        batches = tuple(self._batches or self._inputs)
        settings: dict[str, str] = {}
        if own is not None:
            batches = (Batch("loader", own.epoch, number - 1, "", short(own.batch)),)
            state = state_of_trainer(own.trainer)
        else:
            state, settings = self._collector.state(frames, [])
            state |= self._collector.learnt(frames)
        losses = tuple(self._losses) if math.isnan(loss) else (float(loss).hex(),)
        return TracedStep(
            self.number, 0, f"step {number}", batches, _generators(), settings, state, losses=losses, reported=True
        )  # fmt: skip

    def _steps_before(self, step: TracedStep) -> int:
        reference = self.plan.reference[self.rank] if self.rank < len(self.plan.reference) else ()
        return len(reference) - 1 - reference[::-1].index(step.weights) if step.weights in reference else 0

    def finish(self) -> None:
        """Ends the process: enough steps were seen."""
        self.writer.write("finished", True)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def _generators() -> dict[str, str]:
    import random

    found = {"python": short(random.getstate()), "torch": short(torch.get_rng_state())}
    if (np := sys.modules.get("numpy")) is not None:
        found["numpy"] = short(list(np.random.get_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for i, state in enumerate(torch.cuda.get_rng_state_all()):
            found[f"cuda:{i}"] = short(state)
    return found


@contextlib.contextmanager
def rehearsed(plan: RehearsalPlan) -> Iterator[RehearsalRecorder]:
    """Hooks everything inside the block, for the life of the process."""
    if plan.fixed_entropy:
        fix_entropy()
    if plan.frozen_time:
        freeze_time()
    recorder = RehearsalRecorder(plan)
    guard = Guard(plan.protected, plan.allowed, lambda why: recorder.writer.write("refused", why))
    guard.install()
    _hook_steps(recorder)
    _hook_loaders(recorder)
    _hook_saves(recorder, guard)
    _hook_warnings(recorder)
    _hook_ours(recorder)

    def ended() -> None:
        if recorder.here() and parent_process() is None and getattr(sys, "last_value", None) is None:
            recorder.writer.write("finished", True)

    atexit.register(ended)
    yield recorder


def _hook_steps(r: RehearsalRecorder) -> None:
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        r.before_step(optimizer)

    register_optimizer_step_pre_hook(torch._disable_dynamo(before))  # type: ignore[attr-defined]
    modules = torch.nn.modules.module
    modules.register_module_forward_pre_hook(lambda module, args: r.enter(module, args))
    modules.register_module_forward_hook(lambda module, args, out: r.leave(), always_call=True)
    backward: Any = torch.Tensor.backward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        r.loss(self)
        return backward(self, *args, **kwargs)

    torch.Tensor.backward = noted  # type: ignore[method-assign]


def _hook_loaders(r: RehearsalRecorder) -> None:
    base: Any = torchs._BaseDataLoaderIter
    begin, following, index = base.__init__, base.__next__, base._next_index

    def init(self: Any, loader: Any) -> None:
        begin(self, loader)
        self._rehearsed = (
            None
            if getattr(loader, "_rehearsed_quiet", False)
            else (r.loader(id(loader.dataset)), deque(), [0])
        )

    def next_index(self: Any) -> Any:
        found = index(self)
        noted = getattr(self, "_rehearsed", None)
        if noted is not None:
            noted[1].append(f"{digest(found):016x}")
        return found

    def give(self: Any) -> Any:
        batch = following(self)
        noted = getattr(self, "_rehearsed", None)
        if noted is not None and r.here():
            iteration, asked, count = noted
            r.batch(Batch("loader", iteration, count[0], asked.popleft() if asked else "", short(batch)))
            count[0] += 1
        return batch

    base.__init__, base._next_index, base.__next__ = init, next_index, give


def _hook_ours(r: RehearsalRecorder) -> None:
    """Our own loaders give without torch's iterator where there are no workers; what of unbroken is used is noted."""
    from ..data.loading import loader as ours
    from ..progress.attach import Run

    iterate = ours.Loader.__iter__

    def given(self: Any) -> Iterator[Any]:
        r.uses("data")
        self._inner._rehearsed_quiet = True
        iteration = r.loader(id(self._original.dataset))
        for place, batch in enumerate(iterate(self)):
            at = f"{self._epoch}:{self._at}"
            r.batch(Batch("loader", iteration, place, at, short(batch)))
            yield batch

    ours.Loader.__iter__ = given  # type: ignore[method-assign]

    def reported(step: Any = 0, *args: Any, loss: Any = math.nan, **more: Any) -> None:
        r.uses("attach")
        r.reported(int(step), float(loss))

    _noted(Run, "step", reported)
    _noted(Run, "_nothing", reported)  # what stands in its place outside of a run, with --plain
    for name in ("should_stop", "_never"):
        _noted(Run, name, lambda *_, **__: r.uses("should_stop"))


def _noted(kind: Any, name: str, note: Callable[..., None]) -> None:
    original = getattr(kind, name)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(kind, name, noted)


def _hook_saves(r: RehearsalRecorder, guard: Guard) -> None:
    save = torch.save

    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            guard.check_save(f)
        began = time.perf_counter()
        result = save(obj, f, *args, **kwargs)
        if isinstance(f, str | os.PathLike):
            r.writer.write(
                "save", Save(r.number, time.perf_counter() - began, "torch.save", os.path.getsize(f))
            )
        return result

    torch.save = saved
    with contextlib.suppress(ImportError):
        import safetensors.torch as st

        write = st.save_file

        def written(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            guard.check_save(filename)
            began = time.perf_counter()
            result = write(tensors, filename, *args, **kwargs)
            r.writer.write(
                "save", Save(r.number, time.perf_counter() - began, "safetensors", os.path.getsize(filename))
            )
            return result

        st.save_file = written
    from ..checkpoint import Checkpointer

    make, keep = Checkpointer.__init__, Checkpointer.save

    def init(self: Any, directory: Any = None, **kwargs: Any) -> None:
        r.uses("Checkpointer")
        if "UNBROKEN_RUN_DIR" in os.environ:  # its own folder may hold the checkpoints of a real run
            directory = None
        kwargs.pop("remote", None)
        make(self, directory, **kwargs)

    def kept(self: Any, step: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = keep(self, step, state, *args, **kwargs)
        took = time.perf_counter() - began
        parts = getattr(self, "_parts", None)
        plan = parts.buffers.plan if parts is not None else None
        size = int(plan.buffer_bytes) * self.options.memory.buffers if plan is not None else 0
        r.writer.write("save", Save(r.number, took, "unbroken", size))
        # A rehearsal asks what a resume would do, not whether a snapshot was a moment too late for the kill.
        if r.plan.kill_at >= 0 and r.writer.attempt == 1 and r.number <= r.plan.kill_at:
            for level in ("host", "disk"):
                future = getattr(result, level, None)
                if future is not None:
                    with contextlib.suppress(Exception):
                        future.result(60)
                    break
        return result

    Checkpointer.__init__, Checkpointer.save = init, kept  # type: ignore[method-assign]


def _hook_warnings(r: RehearsalRecorder) -> None:
    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING and r.here():
                r.writer.write("warning", record.getMessage()[:500])

    logging.getLogger("unbroken").addHandler(Noted())
