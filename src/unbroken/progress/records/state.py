"""Where a run stands, folded from its journal alone: a supervisor that starts knows no more than this."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .decision import PastIncident
from .doubt import Doubt

Record = dict[str, Any]
_ENDED_AT_OWN_STEP = ("amended", "resized", "interrupted", "completed")
"""How an attempt ended of which the record tells its own highest step; of others it may be the run's."""


@dataclass(frozen=True)
class Brought:
    """Checkpoints that were not written by this run and that it may go on from. `number` is the attempt's in their
    names; attempt `before` of this run is the first that could restore them."""

    place: str
    number: int
    names: tuple[str, ...]
    before: int


@dataclass
class RunState:
    """The fold. `status` is new, running, completed, stopped or interrupted; `step` the highest completed one
    that was journalled (-1 for none); `seals` maps each sealed attempt to the checkpoints accepted from it."""

    status: str = "new"
    why: str = ""
    started: float | None = None
    command: tuple[str, ...] = ()
    """What the newest attempt runs, or the first one will; () before the run's first record."""
    nodes: int = 0
    nproc: int = 0
    most_ranks: int = 0
    """The most ranks that an attempt of it could have had: a node that was cut off may still tell of such a one."""
    amended: list[dict[str, Any]] = field(default_factory=list)
    """The records of what was changed in between, oldest first."""
    stepped: bool = False
    """Whether a step was made with the command."""
    proven_command: tuple[str, ...] = ()
    """The newest command that made a step, while one that took its place in a live run has made none; else ()."""
    history_before: list[PastIncident] = field(default_factory=list)
    """What counted of the incidents when that one took its place."""
    resized_after: int = 0
    """The last attempt of another number of ranks: what is in memory of it and of those before restores nothing."""
    without: tuple[str, ...] = ()
    """Nodes that left and that nobody takes the place of, while the run goes on with fewer."""
    grown: list[float] = field(default_factory=list)
    """When it stopped for more nodes, or went on with more (seconds since the epoch)."""
    resizes: int = 0
    """The attempt before which the run last had another number of nodes."""
    by_hand: bool = False
    """Whether the command was given again after the run had stopped, and no attempt has begun since."""
    growing: bool = False
    """The newest attempt was stopped for more nodes: what comes of that is counted."""
    attempt: int = 0
    attempt_open: bool = False
    slots: tuple[str, ...] = ()
    restarts: int = 0
    step: int = -1
    incident: int = 0
    unresumed: int | None = None
    history: list[PastIncident] = field(default_factory=list)
    seals: dict[int, tuple[str, ...]] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    """Where the checkpoints of each attempt lie; "" for the run's own folder."""
    origin: str = ""
    """What the run was started from (--from), once it is copied."""
    brought: list[Brought] = field(default_factory=list)
    """What the run took over from elsewhere, oldest first."""
    durable: list[tuple[int, int]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    cordoned: dict[str, str] = field(default_factory=dict)
    held: str = ""
    """How the processes of the newest attempt are held: cgroup, parent or marks; "" where it was not written down."""
    boots: dict[str, str] = field(default_factory=dict)
    """The boot of each node's machine when an attempt last ran there, where that is known."""
    unproven: dict[str, Doubt] = field(default_factory=dict)
    """Nodes of which it is not proven that the processes of attempts before are gone."""
    asked: set[int] = field(default_factory=set)
    """The attempts whose script asked our Checkpointer what to go on from, whether there was anything or not."""
    restored: tuple[int, int | None, int | None] | None = None
    """The newest such answer: the attempt that asked, and attempt and step that it went on from."""
    brought_offers: set[tuple[int, int]] = field(default_factory=set)
    """(attempt, step) of what came from elsewhere and is offered to the newest attempt."""
    accepted: set[tuple[int, int]] = field(default_factory=set)
    """(attempt, step) of snapshots that were whole in memory when their attempt was sealed, or were offered to a
    later one: they count, also where they become durable only afterwards."""

    equal: tuple[int, int] | None = None
    """(attempt, step) of the newest checkpoint where all replicas were equal."""
    corrupted: list[tuple[str, ...]] = field(default_factory=list)
    """The nodes that were suspect each time the run was taken back because replicas differed."""
    cordons: list[tuple[float, str]] = field(default_factory=list)
    """When a node was taken out of use (seconds since the epoch), and for which reason."""
    rollbacks: dict[int, int] = field(default_factory=dict)
    """{attempt: step}: of this attempt and those before it nothing after the step is restored."""
    skips: list[tuple[int, int]] = field(default_factory=list)
    """Samples [start, stop) that are never used, in absolute numbers; in the order in which it was decided."""
    suspects: dict[str, float] = field(default_factory=dict)
    """Nodes that left without anybody being certain of them, and since when (seconds since the epoch): they are out of use too."""
    pairs_due: bool = False
    """Whether all nodes are to be tested in pairs before the next attempt."""
    innocent_s: float = 0.0
    """How long nodes were out of use that returned, with nothing found."""
    faults: int = 0
    """Nodes that were lost, or put out of use."""
    launches: int = 0
    expiry: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record], now: float | None = None) -> RunState:
        """Folds journal records, oldest first; kinds that it does not know are passed over.

        Cordons that have expired at `now` (seconds since the epoch, default: the clock's) are lifted.
        """
        state = cls()
        for record in records:
            state.apply(record)
        moment = time.time() if now is None else now
        state.lift_cordons(moment)
        return state

    def lift_cordons(self, now: float) -> list[str]:
        """Forgets the cordons that have expired at `now`; returns whose."""
        over = [n for n, until in self.expiry.items() if until <= now]
        for node in over:
            del self.expiry[node]
        return [n for n in over if self.cordoned.pop(n, None) is not None]

    def is_rolled_back(self, attempt: int, step: int) -> bool:
        """Whether a snapshot of this run does not count any more, because the training was taken back to before it."""
        return any(attempt <= last and step > before for last, before in self.rollbacks.items())

    def apply(self, r: Record) -> None:
        """Takes one record into account."""
        kind = r["kind"]
        if kind == "run":
            self.started = r["t"]
            self.command = tuple(r.get("command") or ())
            self.nodes, self.nproc = int(r.get("nodes", 0)), int(r.get("nproc", 0))
            self.most_ranks = max(self.most_ranks, self.nodes * self.nproc)
        elif kind == "amended":
            self._amend(r)
        elif kind == "epoch":
            if self.status in ("stopped", "interrupted"):
                # Somebody looked at it and gave the command again: budgets start afresh.
                self.history, self.grown, self.growing, self.by_hand = [], [], False, True
                # Whoever gave a command by hand is told what is wrong with it.
                self._note_proven(stepped=self.stepped)
            if self.status != "completed":
                self.status, self.why = "running", ""
        elif kind == "resized":
            self.without = tuple(r["without"])
            # Written again where the attempt after it could not be launched.
            again, self.resizes = int(r["before"]) == self.resizes, int(r["before"])
            if int(r["nodes"]) > int(r["had"]) and not (self.growing or again or self.by_hand):
                self.grown.append(float(r["t"]))
        elif kind == "attempt":
            if self.slots and len(self.slots) != len(r["slots"]):
                self.resized_after = self.attempt
            self.attempt, self.attempt_open, self.growing, self.by_hand = r["attempt"], True, False, False
            self.slots = tuple(r["slots"])
            self.accepted |= {
                (int(c["attempt"]), int(c["step"])) for c in r.get("candidates") or () if not c.get("brought")
            }
            self.brought_offers = {
                (int(c["attempt"]), int(c["step"])) for c in r.get("candidates") or () if c.get("brought")
            }
            self.places[self.attempt] = str(r.get("place", ""))
            self.held = str(r.get("held", ""))
            for boot, runs in (r.get("boots") or {}).items():
                slots = (i for first, count in runs for i in range(first, first + count))
                self.boots.update({self.slots[i]: str(boot) for i in slots if i < len(self.slots)})
            self.launches += 1
            self.restarts = self.launches - 1
        elif kind == "ended":
            self.attempt_open = False
            if r.get("how") == "renumbered":
                self.launches -= 1  # it only said where its checkpoints lie
            elif r.get("how") == "resized":
                self.growing = True
                self.grown.append(float(r["t"]))
            ended_at = int(r.get("step", -1))
            if ended_at >= 0 and r.get("how") in _ENDED_AT_OWN_STEP:
                self._note_proven(stepped=True)
            # What earlier attempts made beyond the end of the last one does not count: it began again with fewer steps, say.
            self.step = (
                ended_at if r.get("how") == "completed" and ended_at >= 0 else max(self.step, ended_at)
            )
        elif kind == "restored":
            self.asked.add(int(r["attempt"]))
            # Of an earlier attempt it may come late.
            if self.restored is None or int(r["attempt"]) >= self.restored[0]:
                self.restored = (int(r["attempt"]), r.get("of"), r.get("step"))
            if self.attempt_open and (r.get("of"), r.get("step")) in self.brought_offers:
                self.step = int(r["step"])  # on purpose: an import of an earlier step, say
        elif kind == "durable":
            self._note_saved(int(r["attempt"]))
            self.durable.append((r["step"], r["attempt"]))
        elif kind == "replicas":
            if r.get("equal"):
                self.equal = (int(r["attempt"]), int(r["step"]))
        elif kind == "corruption":
            self.corrupted.append(tuple(r.get("nodes") or ()))
        elif kind == "seal":
            if r["checkpoints"] or r.get("memory"):
                self._note_saved(int(r["attempt"]))
            self.seals[r["attempt"]] = tuple(r["checkpoints"])
            self.accepted |= {(int(a), int(s)) for a, s in r.get("memory") or ()}
        elif kind == "origin":
            self.origin = str(r["origin"])
        elif kind == "place":
            self.places[r["attempt"]] = str(r["place"])
        elif kind == "accepted":
            self.brought.append(
                Brought(str(r["place"]), int(r["number"]), tuple(r["checkpoints"]), int(r["before"]))
            )
        elif kind == "incident":
            if r.get("reached", True):
                self._note_proven(stepped=True)
            self.incident = r["incident"]
            self.unresumed = r["incident"]
            self.history.append(
                PastIncident(
                    r["cause"],
                    r["fingerprint"],
                    r["step"],
                    r.get("reached", True),
                    r.get("named", True),
                    r.get("t"),
                )
            )
            self.pairs_due = self.pairs_due or bool(r.get("test_pairs", False))
            self.step = max(self.step, r["step"])
        elif kind in ("first_step", "stepped"):
            self._note_proven(stepped=True)
        elif kind == "resumed":
            self.unresumed = None
            self.step = max(self.step, r["step"])
        elif kind == "rollback":
            self.rollbacks[r["attempt"]] = r["before"]
            self.skips += [s for a, b in r["skip"] if (s := (int(a), int(b))) not in self.skips]
        elif kind == "lost":
            self.lost.add(r["node"])
            self.faults += 1
            self.suspects.pop(r["node"], None)
        elif kind == "returned":
            self.lost.discard(r["node"])
        elif kind == "suspect":
            self.cordoned[r["node"]] = f"suspect since incident {r['incident']}"
            self.suspects[r["node"]] = float(r["t"])
            self.cordons.append((float(r["t"]), "suspect"))
            self.expiry[r["node"]] = math.inf
        elif kind == "cleared":
            if self.suspects.pop(r["node"], None) is not None:
                self.cordoned.pop(r["node"], None)
                self.expiry.pop(r["node"], None)
            self.innocent_s += float(r["seconds"]) if r.get("innocent") else 0.0
        elif kind == "pairs_due":
            self.pairs_due = True
        elif kind == "pairs":
            self.pairs_due = False
        elif kind == "cordon":
            self.cordoned[r["node"]] = r["reason"]
            self.faults += 1
            # One that left as a suspect has been counted among those that left within the hour.
            if self.suspects.pop(r["node"], None) is None:
                self.cordons.append((float(r["t"]), str(r["reason"])))
            self.expiry[r["node"]] = r["t"] + r["expires_s"] if "expires_s" in r else math.inf
        elif kind == "unproven":
            self.unproven[r["node"]] = Doubt(int(r["attempt"]), str(r["why"]), str(r.get("held", "")))
        elif kind in ("proven", "made_sure"):
            self.unproven.pop(r["node"], None)
        elif kind == "status":
            self.status, self.why = r["status"], r.get("why", "")

    def _amend(self, r: Record) -> None:
        """Takes new arguments, or another number of nodes or ranks: budgets start afresh, but where the run goes back to what
        it had."""
        self.amended.append(r)
        self.command = tuple(r["command"])
        if r.get("back"):
            self.history = [*self.history_before, *self.history]
            self._note_proven(stepped=True)
        else:
            if r.get("live") and self.stepped:
                self.proven_command, self.history_before = tuple(r["was"]), self.history
            self.stepped, self.history = False, []
            if not r.get("live") or self.command == self.proven_command:
                self._note_proven(stepped=self.command == self.proven_command)
        if "nodes" in r:
            self.nodes, self.nproc = int(r["nodes"]), int(r["nproc"])
            self.most_ranks = max(self.most_ranks, self.nodes * self.nproc)
            self.slots, self.without, self.resized_after = (), (), self.attempt
        if self.status == "completed":
            self.status, self.why = "running", ""

    def _note_saved(self, attempt: int) -> None:
        """An attempt has saved something: one that runs with the newest command has made a step with it, whether told or not."""
        if not self.amended or attempt >= int(self.amended[-1].get("before", 0)):
            self._note_proven(stepped=True)

    def _note_proven(self, *, stepped: bool) -> None:
        """From the command there is no way back to another one: it has made a step, or was given by hand."""
        self.stepped, self.proven_command, self.history_before = stepped, (), []
