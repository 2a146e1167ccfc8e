"""What a watch keeps from removal: every committed checkpoint that it has not had yet, as long as there is room for them.

A thread of its own looks while a checkpoint is evaluated. What it saw committed and finds gone, and what it lets go for
lack of room or beyond `most`, is handed over with the reason, so that nothing is left out in silence.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ....checkpoint.catalogue.contents import Found
from ....checkpoint.catalogue.holds import Hold, end_hold, take_hold
from ....checkpoint.storage.base import Storage
from ....errors import UnbrokenError

HOLD_S = 3600.0
"""It ends by itself so long after a crash."""
LOOK_S = 1.0
SPARE = 4
"""Room for so many more checkpoints stays free: the training needs it more."""


class Holding:
    """Holds from `start` to `end`."""

    def __init__(
        self,
        storage: Storage,
        holder: str,
        look: Callable[[], Sequence[Found]],
        say: Callable[[str], None],
        *,
        most: int = 0,
        every_s: float = LOOK_S,
    ) -> None:
        """`look`: the listing, newest first. `most`: so many wait at most, the newest; 0: all."""
        self._storage, self._holder, self._look, self._say = storage, holder, look, say
        self._most, self._every_s = most, min(every_s, LOOK_S)
        self._done: set[str] = set()
        self._waiting: dict[str, Found] = {}
        self._lost: list[tuple[Found, str]] = []
        self._taken: tuple[frozenset[str], float] | None = None
        self._complained = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, done: Sequence[str]) -> None:
        """Takes the hold. `done`: had before."""
        self._done.update(done)
        self.poll()
        self._thread.start()

    def done(self, name: str) -> None:
        """This one may go."""
        with self._lock:
            self._done.add(name)
            self._waiting.pop(name, None)

    def lost(self) -> list[tuple[Found, str]]:
        """What was left out since the last call, and why."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def end(self) -> list[str]:
        """Gives the hold back; returns what waited still."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        with contextlib.suppress(UnbrokenError, OSError):  # it ends by itself
            end_hold(self._storage, self._holder)
        return sorted(self._waiting)

    def poll(self) -> None:
        """Notes what is there and what is gone, and renews the hold where it says another thing by now."""
        try:
            there = self._look()
            with self._lock:
                self._note(there)
                done = frozenset(self._done & {f.name for f in there})
            now = time.time()
            if self._taken is None or self._taken[0] != done or now > self._taken[1] - 2 * HOLD_S / 3:
                take_hold(
                    self._storage, Hold(self._holder, now + HOLD_S, done, "each checkpoint is evaluated")
                )
                self._taken = done, now + HOLD_S
        except (UnbrokenError, OSError) as e:
            if not self._complained:
                self._complained = True
                self._say(
                    f"checkpoints cannot be kept from removal: {e} Those removed before their turn are left out."
                )

    def _note(self, there: Sequence[Found]) -> None:
        committed = {f.name: f for f in there if f.committed}
        for name in [n for n in self._waiting if n not in {f.name for f in there}]:
            self._lost.append((self._waiting.pop(name), "removed before it was evaluated"))
        for name, found in committed.items():
            if name not in self._done:
                self._waiting[name] = found
        oldest = sorted(self._waiting.values(), key=lambda f: (f.step, f.attempt))
        while self._most and len(oldest) > self._most:
            self._let_go(oldest.pop(0), f"more than {self._most} waited (--hold)")
        while oldest and not self._room(oldest):
            self._let_go(oldest.pop(0), "let go before its turn: the checkpoints' disk is nearly full")

    def _let_go(self, found: Found, why: str) -> None:
        self._done.add(found.name)
        self._waiting.pop(found.name, None)
        self._lost.append((found, why))

    def _room(self, waiting: Sequence[Found]) -> bool:
        root = getattr(self._storage, "root", None)
        if not isinstance(root, Path) or not root.is_dir():
            return True  # an object store
        free = shutil.disk_usage(root).free
        # What is let go is removed with the next commit: counted as free from now on.
        gone = sum(f.bytes for f, why in self._lost if why.startswith("let go"))
        return free + gone > SPARE * max(f.bytes for f in waiting)

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.poll()
