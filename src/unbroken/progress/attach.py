"""The trainer's side of the progress page: `run = unbroken.attach()`, then `run.step(step, loss=...)`."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import NoReturn

from ..errors import ContractError, LeaseExpired, UsageError
from . import page as _page
from .output import spare_training
from .page import Phase

_NAN = float("nan")


class Run:
    """What a training script says to its run. Outside `unbroken run` every call does nothing.

    `active` tells which; `run_dir`, `run_id`, `node`, `rank` and `attempt` describe the run (None, or 0 for
    the attempt, outside one). `world_sizes` are the numbers of ranks that the run may go on with (`--min-nodes`), the most first;
    () where it keeps its own. `skips` are the samples that are never to be used, as absolute ranges [start, stop): what
    `unbroken.data` leaves out by itself.
    """

    def __init__(self, page: Path | None, total_steps: int | None = None) -> None:
        env = os.environ
        self.active = page is not None
        self.run_dir = Path(env["UNBROKEN_RUN_DIR"]) if self.active and "UNBROKEN_RUN_DIR" in env else None
        self.run_id = env.get("UNBROKEN_RUN_ID") if self.active else None
        self.node = env.get("UNBROKEN_NODE") if self.active else None
        self.rank = int(env.get("RANK", "0"))
        self.attempt = int(env.get("UNBROKEN_ATTEMPT", "0")) if self.active else 0
        self.skips = read_skips(env.get("UNBROKEN_SKIPS", "")) if self.active else ()
        self.world_sizes = _read_sizes(env.get("UNBROKEN_WORLD_SIZES", "")) if self.active else ()
        self._phase = Phase.STARTING
        self._count = 0
        if page is None:
            self.step = self._nothing  # type: ignore[method-assign]
            self.should_stop = self._never  # type: ignore[method-assign]
            return
        self._map = _page.open_map(page)
        view = memoryview(self._map)
        self._data = view[_page.DATA_AT : _page.DATA_AT + 8].cast("d")
        self._state = view[_page.STATE_AT : _page.STATE_AT + 16].cast("Q")
        self._since = view[_page.STATE_AT + 16 : _page.STATE_AT + 24].cast("d")
        self._expired_at = view[_page.STATE_AT + 24 : _page.STATE_AT + 32].cast("d")
        self._lease = view[_page.CONTROL_AT : _page.CONTROL_AT + 8].cast("d")
        self._stop = view[_page.CONTROL_AT + 8 : _page.CONTROL_AT + 16].cast("q")
        self._pid = view[24:32].cast("Q")
        self._total = view[32:40].cast("q")
        self._peers = view[_page.PEERS_AT : _page.PEERS_AT + 8].cast("Q")
        self._pid[0] = os.getpid()
        self._count = int(self._state[0])
        self._since[0] = monotonic()
        if total_steps is not None:
            self._total[0] = total_steps
        # Before threads are joined and what others registered runs: all of that is the interpreter's end, and takes its time.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(self._exit, os.getpid())

    def step(
        self,
        step: int,
        *,
        loss: float = _NAN,
        norm: float = _NAN,
        busy: float = _NAN,
        tokens: int = 0,
        _pack: Callable[..., None] = _page.RECORD.pack_into,
        _at: int = _page.RING_AT,
        _ring: int = _page.RING,
        _size: int = _page.RECORD.size,
        _now: Callable[[], float] = monotonic,
    ) -> None:
        """Says that `step` is complete; call it once per step, on every rank.

        `loss` is a float (a tensor on a GPU would have to be waited for: pass `.item()` of an older step);
        `norm` is that of the gradient, before it is clipped; `busy` the seconds of this step in which the rank did not wait for
        others (from its start to the end of backward, by CUDA events): it finds a slow node with GPUs sooner and surer than their counters do.
        `tokens` counts this step's tokens on all ranks together. Takes about a microsecond, more with cold caches. Raises
        LeaseExpired when this node lost its supervisor for longer than its lease: let it end the process.
        """
        now = _now()
        n = self._count = self._count + 1
        _pack(self._map, _at + (n % _ring) * _size, n, step, tokens, loss, norm, busy, now, n)
        self._state[0] = n
        if self._phase is not Phase.TRAINING:
            self._enter(Phase.TRAINING)
        if 0.0 < self._lease[0] < now:
            self._stop_expired(step, now)

    def should_stop(self, step: int) -> bool:
        """Whether to stop after `step`: the same answer on every rank, for a step that none has passed.

        Save, wait until the checkpoint is durable, and exit with `unbroken.EXIT_STOPPED`.
        """
        return 0 <= self._stop[0] <= step

    def set_peers(self, group: int) -> None:
        """Says which ranks do the same work as this one: those that give the same number, such as their pipeline stage. Who is slow
        is compared among them alone; without it, among all. Raises UsageError for a number below 0, or of more than 32 bits."""
        if not 0 <= group < 1 << 32:
            raise UsageError(
                f"{group} is no group of ranks", hint="Give the number of the pipeline stage, from 0 on"
            )
        if self.active:
            self._peers[0] = group

    def add_data_wait(self, seconds: float) -> None:
        """Says that this rank has waited so long for its data: what tells a slow storage from a slow node. Loaders of `unbroken.data`
        do it by themselves."""
        if self.active:
            self._data[0] += seconds

    def phase(self, name: str) -> _PhaseScope:
        """Enters a phase: starting, compiling, training, evaluating, checkpointing or stopping.

        Each has a deadline of its own for the hang detector. As a context manager it returns to the phase
        before at the end; the next `step()` returns to training in any case. Raises UsageError on another name.
        """
        try:
            new = Phase[name.upper()]
        except KeyError:
            names = ", ".join(p.name.lower() for p in Phase)
            raise UsageError(f"there is no phase '{name}'", hint=f"The phases are {names}") from None
        before = self._phase
        self._enter(new)
        return _PhaseScope(self, before)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        if self.active:
            self._since[0] = monotonic()
            self._state[1] = int(phase)

    def _exit(self, pid: int) -> None:
        """Says that the interpreter ends. A forked child ends too, and its parent trains on."""
        if os.getpid() == pid:
            self._enter(Phase.EXITING)

    def _stop_expired(self, step: int, now: float) -> NoReturn:
        # However the script ends now, its agent can tell that it is no failure of its own.
        self._expired_at[0] = now
        raise LeaseExpired(
            "this rank has not heard from its supervisor for longer than its lease, and stops so that it can "
            "never run beside its successor",
            where=f"node {self.node}, rank {self.rank}, step {step}",
        )

    def _nothing(self, step: int, **_: object) -> None:
        return

    def _never(self, step: int) -> bool:
        return False


def read_skips(text: str) -> tuple[tuple[int, int], ...]:
    """The ranges [start, stop) of "120:160,300:420". Raises ContractError for any other text."""
    try:
        return tuple((int(a), int(b)) for a, b in (part.split(":") for part in text.split(",") if part))
    except ValueError:
        raise ContractError(
            f"'{text[:100]}' are no ranges of samples",
            where="UNBROKEN_SKIPS",
            hint="Write START:STOP,START:STOP",
        ) from None


def _read_sizes(text: str) -> tuple[int, ...]:
    """The numbers of "8,6,4". Raises ContractError for any other text."""
    try:
        return tuple(int(n) for n in text.split(",") if n)
    except ValueError:
        raise ContractError(f"'{text[:100]}' are no numbers of ranks", where="UNBROKEN_WORLD_SIZES") from None


class _PhaseScope:
    def __init__(self, run: Run, before: Phase) -> None:
        self._run, self._before = run, before

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self._run._enter(self._before)


_attached: dict[str, Run] = {}


def attach(*, total_steps: int | None = None) -> Run:
    """Connects this process to its run; outside `unbroken run` returns an object whose calls do nothing.

    Call it once per process and anywhere again: the same object comes back. `total_steps` is only for the
    progress bar. Raises ContractError if the page is of another version.
    """
    place = os.environ.get("UNBROKEN_PAGE", "")
    key = _key()
    if key not in _attached:
        _attached[key] = Run(Path(place) if place else None, total_steps)
        if place:
            spare_training()
    elif total_steps is not None and _attached[key].active:
        _attached[key]._total[0] = total_steps
    return _attached[key]


@contextmanager
def holding_up() -> Iterator[None]:
    """Says, where this process is attached to its run, that a checkpoint holds the training up inside the block.

    A process that never attached stays unattached: its run follows its log.
    """
    run = _attached.get(_key())
    if run is None:
        yield
        return
    with run.phase("checkpointing"):
        yield


def _key() -> str:
    return f"{os.getpid()}:{os.environ.get('UNBROKEN_PAGE', '')}"
