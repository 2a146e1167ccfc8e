"""Finds who makes a synchronous training slow, from the time that each rank spends not waiting for the others. See docs/stragglers.md.

Pure. All ranks show the same step time, so it says nothing of who is slow; their own work differs. It is compared between ranks
that do the same, as ratios within one window of steps, so no clock of two hosts is compared. Where there is no signal, or it
does not point at one node steadily, nobody is named: most slow jobs are slow for their code.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean as mean
from statistics import median


class SlowKind(StrEnum):
    """What makes it slow."""

    NODE = "one node"
    STAGE = "one pipeline stage"
    UNEVEN = "uneven work, as of sequence lengths"
    PAUSES = "pauses of single ranks, as of garbage collection"
    STORAGE = "storage"
    FABRIC = "the whole fabric"
    EVERYBODY = "all ranks alike"
    SEVERAL = "ranks of several nodes"


@dataclass(frozen=True)
class RankWork:
    """One rank's window of steps, in seconds a step: `busy` not waiting for others, `peak` that of its worst step, `data` waiting for
    its data. None: not known. `waits` where `busy` is from the GPU's counters, which hold no time in which the GPU had nothing to do: how
    long its SMs were busy for each second of its tensor cores, which grows with waiting."""

    busy: float
    peak: float | None = None
    data: float | None = None
    waits: float | None = None


@dataclass(frozen=True)
class SlowSettings:
    """When somebody is named. The defaults named nobody in the steps that we recorded (docs/stragglers.md)."""

    windows: int = 8
    """So many windows are looked at together,"""
    least: float = 0.06
    """in their mean a rank has so much more work than its peers,"""
    spreads: float = 6.0
    """so many spreads of such a mean more,"""
    share: float = 0.005
    """and so much of the step's time: what is less does not make it slow."""
    most: float = 0.75
    """In so many of the windows it has half of that, at least, and in the newest: a short slowness is none."""
    apart: float = 2.0
    """And so many times the most that a rank of another node has had in such a mean, now and in the `memory` before: where ranks take
    turns in being slow, as on processors that share their cores, the next one is no finding."""
    memory: int = 32
    """So many means, one each `windows`."""
    held: int = 4
    """What is said of all ranks holds in so many windows one after the other."""
    peers: int = 3
    """Fewer ranks with a signal say nothing."""
    baseline: int = 8
    """So many windows say what is usual for the run itself."""
    slower: float = 0.1
    """A step that takes so much longer than usual is slow, whoever it is."""
    pause: float = 2.0
    """A step of a rank with so much more work than its usual one is a pause."""


@dataclass(frozen=True)
class SlowFinding:
    """What makes the training slow, as of `step`. `ranks` and `nodes` only where one node is at fault (`kind` NODE), or its storage;
    `excess` is how much longer a step takes for it, in seconds; `why` in words."""

    kind: SlowKind
    step: int
    excess: float
    why: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass
class SlowWatch:
    """Watches one attempt. `peers` says which ranks do the same work (a pipeline stage, say); without it all do. `nodes` is the node
    of each rank."""

    nodes: Mapping[int, str]
    peers: Mapping[int, str] = field(default_factory=dict)
    settings: SlowSettings = SlowSettings()

    def __post_init__(self) -> None:
        keep = 2 * self.settings.held
        self._ratios: dict[int, deque[float]] = {r: deque(maxlen=self.settings.windows) for r in self.nodes}
        self._waits: dict[int, deque[float]] = {r: deque(maxlen=self.settings.windows) for r in self.nodes}
        self._unrest: deque[tuple[tuple[float, str], ...]] = deque(maxlen=self.settings.memory)
        self._taken = 0
        self._first: list[tuple[float, float, float]] = []
        self._tops: deque[int | None] = deque(maxlen=keep)
        self._pausing: deque[tuple[int, ...]] = deque(maxlen=keep)
        self._stages: deque[str | None] = deque(maxlen=keep)
        self._slow: deque[SlowKind | None] = deque(maxlen=keep)

    def observe(self, step: int, step_s: float, work: Mapping[int, RankWork]) -> SlowFinding | None:
        """Takes a window that ended with `step`, of steps of `step_s` seconds; what makes it slow now, if anything does."""
        s = self.settings
        known = {r: w for r, w in work.items() if r in self._ratios and w.busy > 0}
        if len(known) < s.peers or step_s <= 0:
            return None
        groups: dict[str, list[int]] = {}
        for r in known:
            groups.setdefault(self.peers.get(r, ""), []).append(r)
        medians = {g: median(known[r].busy for r in ranks) for g, ranks in groups.items()}
        self._take(known, groups, medians, step_s)
        return (
            self._find_node(step, step_s, known, medians)
            or self._find_stage(step, step_s, medians)
            or self._find_uneven(step, step_s, known, medians)
            or self._find_slower(step, step_s, known)
        )

    def _take(
        self,
        known: Mapping[int, RankWork],
        groups: Mapping[str, list[int]],
        medians: Mapping[str, float],
        step_s: float,
    ) -> None:
        s = self.settings
        top: tuple[float, int] | None = None
        for g, ranks in groups.items():
            if len(ranks) < s.peers:
                continue
            ratios = {r: known[r].busy / medians[g] for r in ranks}
            waits = {r: w for r in ranks if (w := known[r].waits) is not None}
            usual = median(waits.values()) if waits else 1.0
            for r in ranks:
                if r in waits:
                    self._waits[r].append(waits[r] / usual)
                else:
                    self._waits[r].clear()
            limit = 1 + max(s.least, s.spreads * _measure(ratios.values()))
            for r, x in ratios.items():
                self._ratios[r].append(x)
                if (
                    x > limit
                    and known[r].busy - medians[g] > s.share * step_s
                    and waits.get(r, usual) <= usual
                    and (top is None or x > top[0])
                ):
                    top = (x, r)
        self._tops.append(top[1] if top else None)
        paused = [
            r for r, w in known.items() if w.peak is not None and w.peak > s.pause * w.busy and w.peak - w.busy > s.share * step_s
        ]  # fmt: skip
        self._pausing.append(tuple(paused))
        if len(medians) > 1 and all(w.waits is None for w in known.values()):
            # By counters stages that launch other kernels cannot be compared: who waits more is not known.
            high, *rest = sorted(medians, key=lambda g: -medians[g])
            usual = median(medians[g] for g in rest)
            self._stages.append(high if medians[high] > (1 + s.slower) * usual else None)

    def _find_node(
        self, step: int, step_s: float, known: Mapping[int, RankWork], medians: Mapping[str, float]
    ) -> SlowFinding | None:
        s = self.settings
        held, means = [], dict[int, float]()
        for g in medians:
            peers = [r for r in known if self.peers.get(r, "") == g and len(self._ratios[r]) == s.windows]
            if len(peers) >= s.peers:
                means |= {r: mean(self._ratios[r]) for r in peers}
                held += self._find_outliers({r: means[r] for r in peers}, s.share * step_s / medians[g])
        others = self._remember(means)
        if not held:
            return None
        excess = max((means[r] - 1) * medians[self.peers.get(r, "")] for r in held)
        nodes = Counter(self.nodes[r] for r in held)
        share = median(means[r] for r in held) - 1
        ranks = tuple(sorted(held))
        if len(nodes) > 1:
            why = f"{len(ranks)} ranks on {len(nodes)} nodes have {share:.0%} more work than their peers: see what they have in common"
            return SlowFinding(SlowKind.SEVERAL, step, excess, why)
        (node,) = nodes
        if share < s.apart * max((x for x, n in others if n != node), default=0.0):
            return None
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
        why = f"{named} on {node}: {share:.0%} more time at work than {'its' if len(ranks) == 1 else 'their'} peers, who wait {excess:.3g} s in each step of {step_s:.3g} s"
        if any(known[r].waits is not None for r in held):
            why += " (as the GPUs' counters say, which show less of a difference than there is)"
        return SlowFinding(SlowKind.NODE, step, excess, why, ranks, (node,))

    def _remember(self, means: Mapping[int, float]) -> list[tuple[float, str]]:
        """The largest means of two nodes, now and once each `windows` before: how far one node may lie above its peers by itself."""
        largest: dict[str, float] = {}
        for r, x in means.items():
            largest[self.nodes[r]] = max(x - 1, largest.get(self.nodes[r], 0.0))
        now = tuple(sorted(((x, n) for n, x in largest.items()), reverse=True)[:2])
        before = [x for block in self._unrest for x in block]
        self._taken += 1
        if self._taken % self.settings.windows == 0:
            self._unrest.append(now)
        return [*now, *before]

    def _find_outliers(self, means: Mapping[int, float], share: float) -> list[int]:
        """Those whose mean over the windows is far above 1, where the mean of that many would be by chance: as windows differ, taken as
        independent, or as the means of the peers do, which they are not where ranks share what they run on. What differs
        between two ranks all the time and by little is below `least`. Who waits more than his peers holds nobody up."""
        s = self.settings
        by_chance = _measure(x for r in means for x in self._ratios[r]) / math.sqrt(s.windows)
        more = max(s.least, s.spreads * max(by_chance, _measure(means.values())), share)
        high = 1 + s.least / 2
        return [
            r for r, x in means.items()
            if x > 1 + more and self._ratios[r][-1] > high and sum(x > high for x in self._ratios[r]) >= s.most * s.windows
            and mean(self._waits[r] or [1.0]) <= 1
        ]  # fmt: skip

    def _find_stage(self, step: int, step_s: float, medians: Mapping[str, float]) -> SlowFinding | None:
        s = self.settings
        last = list(self._stages)[-s.held :]
        if len(last) < s.held or last[0] is None or len(set(last)) > 1:
            return None
        usual = median(m for g, m in medians.items() if g != last[0])
        excess = medians[last[0]] - usual
        if excess <= s.share * step_s:
            return None
        why = f"stage {last[0]} has {medians[last[0]] / usual - 1:.0%} more work than the others, on all of its ranks: balance the layers"
        return SlowFinding(SlowKind.STAGE, step, excess, why)

    def _find_uneven(
        self, step: int, step_s: float, known: Mapping[int, RankWork], medians: Mapping[str, float]
    ) -> SlowFinding | None:
        """Somebody else is slow each time."""
        s = self.settings
        pausing = [p for p in self._pausing if p]
        ranks = {r for p in pausing for r in p}
        if len(pausing) >= s.held and len(ranks) >= s.peers:
            excess = median(max(known[r].peak or 0.0 for r in known) - known[r].busy for r in known)
            why = f"single steps of {len(ranks)} ranks take {s.pause:g} times their usual work and more, now this one and now that one: garbage collection, at its own time on each rank? (gc.freeze, gc.collect every so many steps)"
            return SlowFinding(SlowKind.PAUSES, step, excess, why)
        tops = [t for t in self._tops if t is not None]
        if (
            len(self._tops) == self._tops.maxlen
            and len(tops) > len(self._tops) // 2
            and len(set(tops)) >= s.peers
        ):
            excess = max(known[r].busy - medians[self.peers.get(r, "")] for r in known)
            why = f"{len(set(tops))} different ranks had the most work in the last {len(self._tops)} windows: the work is uneven, see the lengths of the sequences"
            return SlowFinding(SlowKind.UNEVEN, step, excess, why)
        return None

    def _find_slower(self, step: int, step_s: float, known: Mapping[int, RankWork]) -> SlowFinding | None:
        """The step takes longer than it did, and no rank stands out."""
        s = self.settings
        busy = median(w.busy for w in known.values())
        waits = [w.data for w in known.values() if w.data is not None]
        data = max(waits, default=0.0)
        if len(self._first) < s.baseline:
            self._first.append((step_s, busy, data))
            return None
        usual, usual_busy, usual_data = (median(x[i] for x in self._first) for i in range(3))
        excess = step_s - usual
        spread = 1.4826 * median(abs(x[0] - usual) for x in self._first)
        kind = None
        if excess > max(s.slower * usual, s.spreads * spread):
            if data - usual_data > excess / 2:
                kind = SlowKind.STORAGE
            elif busy - usual_busy > excess / 2:
                kind = SlowKind.EVERYBODY
            elif all(w.waits is None for w in known.values()):
                kind = SlowKind.FABRIC  # else it may be the processors that the GPUs wait for
        self._slow.append(kind)
        if kind is None or len(self._slow) < 2 * s.held or {*self._slow} != {kind}:
            return None
        what = {
            SlowKind.STORAGE: "and the time that ranks wait for their data grew with it",
            SlowKind.EVERYBODY: "and the work of all ranks grew with it: clocks, code or data, but no single node",
            SlowKind.FABRIC: "and no rank works longer: the collectives do; see the network as a whole",
        }[kind]
        return SlowFinding(
            kind, step, excess, f"a step takes {step_s:.3g} s where {usual:.3g} s was usual, {what}"
        )


@dataclass
class SlowCost:
    """What a slow node has cost so far, or a slow fabric, against what it costs to leave the node, or to test all nodes in pairs: the
    dearer action is worth it when the loss reaches its price (ski rental: never more than twice what was best)."""

    price_s: float
    lost_s: float = 0.0
    _of: tuple[SlowKind, tuple[str, ...]] | None = None

    def add(self, finding: SlowFinding | None, steps: int) -> bool:
        """Counts `steps` more; True once the loss has reached the price for the same node, or for the fabric."""
        if finding is None or finding.kind not in (SlowKind.NODE, SlowKind.FABRIC):
            return False
        if (finding.kind, finding.nodes) != self._of:
            self._of, self.lost_s = (finding.kind, finding.nodes), 0.0
        self.lost_s += finding.excess * steps
        return self.lost_s >= self.price_s


def _measure(ratios: Iterable[float]) -> float:
    """The spread of ratios around 1, as the median deviation says it."""
    return 1.4826 * median(abs(x - 1) for x in ratios)
