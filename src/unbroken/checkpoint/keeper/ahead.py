"""What the ranks of an attempt will most likely restore, fetched from other nodes' memory beside their start.

A hint and nothing more: it takes no buffer that holds a snapshot and none beyond the budget, and what fails, or is of another
snapshot than the ranks agree on, costs what it cost. A restore asks as ever, waits for what is on its way, and fetches the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ...errors import UnbrokenError
from ...link.bounds import Malformed, text
from .buffers.holdings import FINALIZED, FREE, SnapshotId
from .buffers.memory import NodeMemory
from .clients import KeeperSettings
from .peers import Asking, Peers, machine_of
from .wire import Message

TIMEOUT_S = 10.0
"""For a peer that answers nothing: a restore waits no longer for it than that, and asks it again by itself."""


class AheadHome(Protocol):
    """What fetching ahead needs of its keeper."""

    changed: threading.Condition
    memory: NodeMemory
    settings: KeeperSettings
    peers: Peers
    attempt: int
    local: dict[int, int]

    def emit(self, event: Message) -> None: ...


@dataclass(frozen=True)
class RingMember:
    """Where a keeper gives snapshots to others: on its machine (`here`), and to others' (`wide`); "" where it does not."""

    token: str = field(repr=False)
    machine: str
    here: str
    wide: str

    @classmethod
    def of(cls, peers: Peers, socket: Path) -> RingMember:
        """This keeper, as its ranks have set it up until now."""
        return cls(peers.token, machine_of(socket), *peers.addresses())

    @classmethod
    def from_json(cls, value: Any) -> RingMember:
        """Raises Malformed."""
        if not isinstance(value, dict):
            raise Malformed("a member of the ring is no table")
        return cls(*(text(value.get(key), key, most=400) for key in ("token", "machine", "here", "wide")))

    def as_json(self) -> Message:
        return {"token": self.token, "machine": self.machine, "here": self.here, "wide": self.wide}

    def address_for(self, machine: str) -> str:
        """How a keeper of that machine reaches it."""
        return self.here if self.here and self.machine == machine else self.wide


@dataclass(eq=False)
class _Fetching:
    """One attempt's: of which snapshot, for which ranks, and what came of it."""

    attempt: int
    snapshot_id: SnapshotId
    ranks: frozenset[int]
    coming: set[int]
    began: float = field(default_factory=time.monotonic)
    bytes: int = 0
    whys: list[str] = field(default_factory=list)
    over: bool = False
    """The ranks have restored, or the attempt has ended: what has not come by now is not needed."""
    unneeded: bool = False
    """The ranks went on from another snapshot."""


class FetchAhead:
    """Fetches for one attempt at a time. All is called with `home.changed` held."""

    def __init__(self, home: AheadHome) -> None:
        self._home = home
        self._now: _Fetching | None = None

    def begin(self, ranks: Iterable[int], candidates: Sequence[Mapping[str, Any]], ring: Any) -> None:
        """An attempt begins here with these ranks: fetches of the first candidate what of theirs `ring` ({node: member}) has and
        this node lacks. Never raises."""
        self.end()
        self._now = None
        if not isinstance(ring, dict) or not candidates or candidates[0].get("brought"):
            return
        first = candidates[0]
        snapshot_id = SnapshotId(int(first["attempt"]), int(first["step"]))
        machine = machine_of(self._home.settings.socket)
        found: dict[int, tuple[str, str]] = {}
        for rank in ranks:
            holder = (first.get("memory") or {}).get(str(rank), "")
            if holder not in ring or self._home.memory.holdings.find(snapshot_id, rank) is not None:
                continue
            try:
                member = RingMember.from_json(ring[holder])
            except Malformed:
                continue
            if address := member.address_for(machine):
                found[rank] = address, member.token
        if not found:
            return
        self._now = now = _Fetching(self._home.attempt, snapshot_id, frozenset(found), set(found))
        for rank, (address, token) in found.items():
            how = Asking(token, self._home.settings.identity, TIMEOUT_S, lambda: not now.over, only_free=True)
            threading.Thread(target=self._fetch, args=(now, rank, address, how), daemon=True).start()

    def wait_for(self, snapshot_id: SnapshotId, rank: int) -> None:
        """Waits until this rank's share is here, or will not come, if it is on its way."""
        now = self._now
        while now is not None and now.snapshot_id == snapshot_id and rank in now.coming:
            self._home.changed.wait()

    def holds(self, snapshot_id: SnapshotId, rank: int) -> bool:
        """Whether this rank's share of it was fetched ahead."""
        now = self._now
        return now is not None and now.snapshot_id == snapshot_id and rank in now.ranks - now.coming

    def settle(self, restored: SnapshotId | None) -> None:
        """The ranks have restored this, or could restore nothing: what is still coming stops. Where they agreed on another
        snapshot what was fetched goes; where nothing was good on all of them it stays, for the next attempt to find."""
        self.end()
        if self._now is not None and restored is not None and restored != self._now.snapshot_id:
            self._now.unneeded = True
            self._drop_unneeded(self._now)

    def end(self) -> None:
        """What is still coming stops."""
        if self._now is not None:
            self._now.over = True

    # --- in threads of their own

    def _fetch(self, now: _Fetching, rank: int, address: str, how: Asking) -> None:
        home, size, why = self._home, 0, "it ended"
        try:
            b = home.peers.pull(address, now.snapshot_id, rank, how)
            size, why = b.snapshot.file_bytes if b.snapshot else 0, ""
        except (UnbrokenError, OSError) as e:
            why = e.message if isinstance(e, UnbrokenError) else str(e)
        finally:
            with home.changed:
                now.coming.discard(rank)
                now.bytes += size
                if why:
                    now.whys.append(why)
                if now.unneeded:
                    self._drop_unneeded(now)
                if home.attempt != now.attempt and rank not in home.local:
                    self._drop_free(rank)
                if not now.coming:
                    home.emit(_describe(now))
                home.changed.notify_all()

    def _drop_unneeded(self, now: _Fetching) -> None:
        holdings = self._home.memory.holdings
        for b in [b for rank in now.ranks for b in holdings.of_rank(rank)]:
            of = b.snapshot.snapshot_id if b.snapshot else None
            if b.state == FINALIZED and of == now.snapshot_id and holdings.may_reuse(b):
                holdings.drop(b)

    def _drop_free(self, rank: int) -> None:
        """Gives back what an attempt that began meanwhile could not: it was being received into."""
        for b in self._home.memory.holdings.of_rank(rank):
            if b.state == FREE and not b.pins:
                self._home.memory.holdings.drop(b)


def _describe(now: _Fetching) -> Message:
    """What the supervisor is told when it has ended."""
    return {
        "event": "ahead", "attempt": now.attempt, "step": now.snapshot_id.step, "of": now.snapshot_id.attempt,
        "fetched": len(now.ranks) - len(now.whys), "missed": len(now.whys), "why": (now.whys or [""])[0][:300],
        "bytes": now.bytes, "seconds": round(time.monotonic() - now.began, 3),
    }  # fmt: skip
