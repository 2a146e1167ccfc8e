"""Copying live tensors into a buffer of the keeper: on the CPU at once, on a GPU behind the trainer's back.

On a GPU an event on the training stream marks the state of the call; a copy stream waits for it and copies into
registered host memory, piece by piece, so that a number which the training reads meanwhile need not wait for all of them;
before the next mutation the training *stream* waits for the copies that still run. The processor waits for nothing but the
handing over. What is changed outside of optimizers (buffers, averages, fp8 scales) is cloned on the
device at the call, in the training stream's own order. Needs torch.

The floor: stall = max(0, bytes / D2H bandwidth - time until the next mutation). Where that costs more than a copy on
the device and the GPU has room, everything is copied there first ("device copy", device_copy.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import CheckpointError, UnbrokenError
from ..format.layout import Layout
from .beside import beside_captures
from .device_copy import DeviceCopy
from .targets import Target, Targets, batches, real

logger = logging.getLogger("unbroken.checkpoint")

_QUEUED = 512
"""Copies that the driver is given at a time. It holds about a thousand; whoever brings more waits for room, and meanwhile
keeps every other thread from starting a kernel."""
_PIECE_BYTES = 64 << 20
_UNDER_WAY = 8
"""So much at a time, and so many of these (10 ms of a bus), lie with the GPU while the training computes."""
_STREAMS = 2
"""A copy engine stays with a stream as long as that has copies, and a number that the training reads meanwhile (a loss) waits for all of
them. Where pieces are given to two streams in turn, each after the other's, it looks after each piece for who else is there
(`benchmarks/copy_reads.py`, on an H200). Smaller pieces let reads wait less, and cost the training's thread more."""
_LOOK_S = 0.002


class TornSnapshot(CheckpointError):
    """A tensor was changed while it was being copied, without `wait_for_copies()` before."""


@dataclass(eq=False)
class Copying:
    """A copy under way. `on_done` is called once, when the buffer is whole or (`error`) never will be."""

    on_done: Callable[[Copying], None]
    began: float = field(default_factory=time.monotonic)
    error: UnbrokenError | None = None
    seconds: float = 0.0
    """From the call until the last byte was on the host."""
    stall_s: float = 0.0
    """By how much the copies outlasted the window until the next mutation."""
    device_copy: bool = False


class Stager(Protocol):
    """Copies tensors into a buffer."""

    last_stall_s: float
    """By how much the last copies that ended outlasted the window until the next mutation."""

    def copy(
        self,
        pieces: Mapping[str, torch.Tensor],
        buffer: torch.Tensor,
        layout: Layout,
        protected: frozenset[str],
        on_done: Callable[[Copying], None],
    ) -> Copying:
        """Takes the tensors as they are now; `on_done` is called when the buffer is whole."""

    def wait_for_copies(self) -> None:
        """What is done to the tensors from now on is not in any copy that was begun before."""

    def drain(self) -> None:
        """Waits on the processor until no copy runs."""

    def close(self) -> None:
        """Ends threads and hooks."""


class CpuStager:
    """Copies at the call: on the CPU forward and backward would compete with a copy for the same cores."""

    last_stall_s = 0.0

    def __init__(self) -> None:
        self._targets = Targets()

    def copy(
        self,
        pieces: Mapping[str, torch.Tensor],
        buffer: torch.Tensor,
        layout: Layout,
        protected: frozenset[str],
        on_done: Callable[[Copying], None],
    ) -> Copying:
        copying = Copying(on_done)
        targets = self._targets.of(buffer, layout, pieces)
        with torch.no_grad():
            # One call for all of them, without the interpreter's lock.
            if pieces:  # a state may be nothing but numbers
                torch._foreach_copy_([targets[n].view for n in pieces], [real(t) for t in pieces.values()])
        copying.seconds = time.monotonic() - copying.began
        on_done(copying)
        return copying

    def wait_for_copies(self) -> None:
        """Nothing is ever under way."""

    def drain(self) -> None:
        """As `wait_for_copies`."""

    def close(self) -> None:
        """Lets go of the buffers."""
        self._targets.clear()


@dataclass(eq=False)
class _Pending:
    """Copies on the copy stream that may still run."""

    copying: Copying
    sources: list[torch.Tensor]
    """Kept alive until they are copied."""
    watched: list[tuple[str, torch.Tensor, int]]
    """Live tensors and their versions at the call: a change before the wait for the copies means a torn snapshot."""
    called: torch.cuda.Event
    """Before the copy on the device, where there is one."""
    begin: torch.cuda.Event
    end: torch.cuda.Event
    waited: torch.cuda.Event | None = None
    remaining: list[tuple[Target, torch.Tensor]] = field(default_factory=list)
    """What goes where; empty once all of it was given to the copy stream."""
    issued: threading.Event = field(default_factory=threading.Event)
    hurry: threading.Event = field(default_factory=threading.Event)

    def torn(self) -> TornSnapshot | None:
        """What is wrong where a live tensor was changed since the call."""
        for name, t, version in self.watched:
            if t._version != version:
                return TornSnapshot(
                    f"'{name}' was changed while it was being copied, without wait_for_copies() before",
                    hint="Call checkpoints.wait_for_copies() before changing it",
                )
        return None


class CudaStager:
    """Copies GPU tensors on a stream of its own. One per process and device.

    `throttle` bounds the copies to that many bytes per second. `device_copy`: "auto", True or False.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        throttle: float | None = None,
        device_copy: bool | str = "auto",
    ) -> None:
        self.device = device
        self.throttle = throttle
        self.device_copy = device_copy
        self.streams = [torch.cuda.Stream(device) for _ in range(_STREAMS)]
        self.last: Copying | None = None
        """The last copy that ended."""
        self.last_stall_s = 0.0
        self._pending: list[_Pending] = []
        self._guard = threading.Lock()
        self._done: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._captured = False
        self._waited_by_hand = False
        self._on_device = DeviceCopy(device, device_copy)
        self._targets = Targets()
        # The hook must not keep this object, nor the object its process, alive.
        me = weakref.ref(self)
        self._hook = register_optimizer_step_pre_hook(_wait_before_step(me))
        self._watcher = threading.Thread(target=_watch, args=(self._done, me, device), daemon=True)
        self._watcher.start()

    def copy(
        self,
        pieces: Mapping[str, torch.Tensor],
        buffer: torch.Tensor,
        layout: Layout,
        protected: frozenset[str],
        on_done: Callable[[Copying], None],
    ) -> Copying:
        if self._captured and not self._waited_by_hand and self._pending:
            raise CheckpointError(
                "an optimizer step was captured in a CUDA graph, whose replays call no hook, and wait_for_copies() was not called"
                " since the last save",
                hint="Call checkpoints.wait_for_copies() before each graph.replay()",
            )
        self._waited_by_hand = False
        copying = Copying(on_done)
        current = torch.cuda.current_stream(self.device)
        gpu: list[tuple[Target, torch.Tensor]] = []
        cpu: list[tuple[torch.Tensor, torch.Tensor]] = []
        watched: list[tuple[str, torch.Tensor, int]] = []
        where = self._targets.of(buffer, layout, pieces)
        with torch.no_grad():
            for name, t in pieces.items():
                target = where[name]
                if not t.is_cuda:
                    cpu.append((target.view, real(t)))
                elif target.stop > target.start:
                    source = real(t)
                    if not source.is_contiguous():
                        # What does not lie in rows is copied here, on the device, in the stream's own order.
                        source = source.contiguous()
                    elif t.is_conj():
                        pass  # a copy already
                    elif name in protected:
                        watched.append((name, t, t._version))
                    else:
                        source = source.clone()
                    gpu.append((target, source))
            if cpu:
                torch._foreach_copy_([v for v, _ in cpu], [t for _, t in cpu])
            called, begin = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True, blocking=True)
            if (copied := self._on_device.make(gpu, bool(self._pending), called)) is not None:
                gpu, watched = copied, []
                copying.device_copy = True
            begin.record(current)
            pending = _Pending(copying, [t for _, t in gpu], watched, called, begin, end)
            for stream in self.streams:
                stream.wait_event(begin)
            pending.remaining = gpu
            with self._guard:
                self._pending.append(pending)
        try:
            # Handing hundreds of copies to the driver takes milliseconds in which this thread could start the next step, and what
            # the training reads would wait behind all of them. Until a wait for the copies they are handed over a few at a time.
            threading.Thread(target=self._issue_beside, args=(pending,), daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            pending.hurry.set()
            self._issue(pending)
        self._done.put(pending)
        return copying

    def _issue_beside(self, pending: _Pending) -> None:
        beside_captures()
        self._issue(pending)

    def _issue(self, pending: _Pending) -> None:
        """Gives the copies to the copy stream, a few at a time until somebody waits for them; with a throttle not faster than that."""
        whole = False
        hurry = pending.hurry
        try:
            sent, began = 0, time.monotonic()
            under_way: deque[torch.cuda.Event] = deque()
            pieces = batches(
                pending.remaining, lambda: float("inf") if hurry.is_set() else _PIECE_BYTES, _QUEUED // 2
            )
            with torch.cuda.device(self.device), torch.no_grad():
                for number, (targets, sources) in enumerate(pieces):
                    while len(under_way) >= _UNDER_WAY and not hurry.is_set():
                        if under_way[0].query():
                            under_way.popleft()
                        else:
                            hurry.wait(_LOOK_S)
                    stream = self.streams[number % len(self.streams)]
                    if under_way:
                        stream.wait_event(under_way[-1])
                    with torch.cuda.stream(stream):
                        # One call for all of them, without the interpreter's lock.
                        torch._foreach_copy_(targets, sources, non_blocking=True)
                    under_way.append(torch.cuda.Event())
                    under_way[-1].record(stream)
                    if self.throttle is not None:
                        sent += sum(t.nbytes for t in targets)
                        ahead = sent / self.throttle - (time.monotonic() - began)
                        if ahead > 0:
                            hurry.wait(ahead)
                self._mark_end(pending)
            whole = True
        except RuntimeError as e:
            pending.copying.error = _failed(e)
        finally:
            # Whatever it was: nobody may wait for copies that will never be made, nor take them for made.
            if not whole:
                pending.copying.error = pending.copying.error or _failed("its thread ended")
                # Some may be under way: the buffer is not given back before they end.
                with suppress(RuntimeError):
                    self._mark_end(pending)
            pending.remaining = []
            pending.issued.set()

    def _mark_end(self, pending: _Pending) -> None:
        """Whatever was given to the streams is over at the end."""
        first, *others = self.streams
        for stream in others:
            first.wait_stream(stream)
        pending.end.record(first)

    def wait_for_copies(self, by_hand: bool = True) -> None:
        self._waited_by_hand = self._waited_by_hand or by_hand
        with self._guard:
            open_ones = [p for p in self._pending if p.waited is None]
        if not open_ones:
            return
        if torch.cuda.is_current_stream_capturing():
            self._captured = True
            raise CheckpointError(
                "an optimizer step is being captured in a CUDA graph while a snapshot is being copied",
                hint="Call checkpoints.wait_for_copies() and torch.cuda.synchronize() before the capture, and checkpoints.wait_for_copies()"
                " before each replay",
            )
        current = torch.cuda.current_stream(self.device)
        for p in open_ones:
            p.copying.error = p.torn() or p.copying.error
            if not p.copying.device_copy:
                p.hurry.set()
                p.issued.wait()
            waited = torch.cuda.Event(enable_timing=True)
            waited.record(current)
            p.waited = waited  # only now: the watcher may be measuring
            # `begin` comes after the copy on the device, where there is one: then nothing reads the live tensors any more.
            current.wait_event(p.begin if p.copying.device_copy else p.end)

    def before_step(self) -> None:
        """What the optimizer's hook calls."""
        if torch.cuda.is_current_stream_capturing():
            if not self._waited_by_hand:
                raise CheckpointError(
                    "an optimizer step is captured in a CUDA graph: replays of the graph call no hook, so a snapshot"
                    " could be torn",
                    hint="Call checkpoints.wait_for_copies() before the capture and before each graph.replay()",
                )
            self._captured = True
        self.wait_for_copies(by_hand=False)

    def drain(self) -> None:
        while True:
            with self._guard:
                if not self._pending:
                    return
                p = self._pending[0]
            p.hurry.set()
            p.issued.wait()
            with suppress(RuntimeError):  # the watcher says it
                p.end.synchronize()
            time.sleep(0.001)

    def close(self) -> None:
        self._hook.remove()
        self._done.put(None)
        self._on_device.release()
        self._targets.clear()

    def finished(self, p: _Pending) -> None:
        """Called by the watcher when a copy has ended: measures it, lets the sources go."""
        c = p.copying
        c.seconds = time.monotonic() - c.began
        with suppress(RuntimeError, ValueError):  # only a measure; a GPU that failed says so elsewhere
            self._learn(p)
        with self._guard:
            self._pending.remove(p)
        p.sources, p.watched = [], []
        self.last, self.last_stall_s = c, c.stall_s
        c.on_done(c)

    def _learn(self, p: _Pending) -> None:
        """What this copy tells about the next one."""
        if p.copying.error is not None:
            return
        # Without a wait for the copies that has come to pass, the copy ended within the window.
        stall = 0.0
        if p.waited is not None and p.waited.query():
            stall = max(0.0, p.begin.elapsed_time(p.end) - p.begin.elapsed_time(p.waited)) / 1e3
        choice = self._on_device.choice
        choice.stalled(stall)
        if p.copying.device_copy:
            choice.cost_s = p.called.elapsed_time(p.begin) / 1e3
        else:
            p.copying.stall_s = stall
            if choice.worth_a_look and choice.cost_s is None:
                self._on_device.probe(p.sources, sum(t.nbytes for t in p.sources), self.streams[0])


def _failed(why: object) -> CheckpointError:
    return CheckpointError(f"copying from the GPU failed: {why}"[:500])


def _watch(
    done: queue.SimpleQueue[_Pending | None], me: weakref.ref[CudaStager], device: torch.device
) -> None:
    beside_captures()
    torch.cuda.set_device(device)
    while (p := done.get()) is not None:
        p.issued.wait()
        try:
            p.end.synchronize()
        except RuntimeError as e:
            p.copying.error = p.copying.error or _failed(e)
        # A change that came before the copy ended and before any wait for the copies would have torn it.
        if p.waited is None and p.copying.error is None:
            torn = p.torn()
            if p.waited is None:  # still: after a wait for the copies the training may change what it likes
                p.copying.error = torn
        stager = me()
        if stager is not None:
            stager.finished(p)
        del stager


def _wait_before_step(me: weakref.ref[CudaStager]) -> Callable[..., None]:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        stager = me()
        if stager is not None:
            stager.before_step()

    disabled: Callable[..., None] = torch._disable_dynamo(hook)  # type: ignore[attr-defined]
    return disabled
