"""The kinds of lines that rules and structures tell apart, and what all logs of one diagnosis know of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..read.decoration import SAMPLE_LINES, Learner
from .rules import Rule, RuleSet, Search, loose_search, loose_set

_FREE_HITS, BYTES_PER_HIT = 300, 16 << 10
_FREE_READS, _BYTES_PER_READ = 800, 32 << 10
_FREE_WRITERS, _BYTES_PER_WRITER = 5000, 16 << 10
_MANY_LOGS, _FEW_LINES, _FREE_METRICS = 64, 12, 2000
_TAIL, _LEAST_TAIL, _TAILS = 256 << 10, 8 << 10, 8 << 20

# What a line may mean beside the rules: see `Scanner._matter` and `TopologyReader.see`.
_STRUCTURE = (
    r"Traceback \(most recent call last\)", r"Xid \(", r"\brank \d+ nranks \d+ cudaDev", r"Bootstrap ?: Using",
    r"(?:nodelist|NODELIST|nodes|hosts|NodeList)[=:] ?[A-Za-z]", r"(?:gpus[_-]per[_-]node|nproc[_-]per[_-]node|GPUS_PER_NODE|ntasks-per-node)[= :]+\d",
    r"\b(?:world[ _]size|WORLD_SIZE)['\"]?\s*[:=]\s*\d", r"\s(?:time|host|rank|exitcode|pid)\s+:\s", r"failed \(exitcode: -?\d+\)",
    r"Root Cause \(first", r"Failures:", r"util(?:ization)?[=: ]+\d+\s?%", r"Exception Group", r"exc_info|\"exception\"|stack_trace",
)  # fmt: skip

Ids = tuple[int, ...]


@dataclass
class LineSample:
    """What fits the lines of some chunks, to estimate others from."""

    chunks: int = 0
    lines: int = 0
    fits: Counter[Ids] = field(default_factory=Counter)


class Patterns:
    """All rules and structures in one matcher that does not care where on a line they stand."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._regexes = [r.regex for r in rules] + list(_STRUCTURE)
        self._match = loose_set(self._regexes)
        self._each: dict[int, Search] = {}

    @property
    def usable(self) -> bool:
        """Whether whole chunks can be tried at once (google-re2 is there)."""
        return self._match is not None

    def __call__(self, text: bytes) -> Ids:
        """The numbers of what fits somewhere in `text`, in order; () where nothing does."""
        if b"\\" in text:  # text within JSON
            text = text.replace(b"\\n", b"\n").replace(b"\\t", b"\t").replace(b'\\"', b'"')
        assert self._match is not None
        found = self._match(text)
        return tuple(sorted(found)) if found else ()

    def find(self, one: int, text: bytes, pos: int) -> int:
        """Where in `text`, from byte `pos` on, number `one` fits first; -1 where nowhere."""
        search = self._each.get(one)
        if search is None:
            search = self._each[one] = loose_search(self._regexes[one])
        m = search(text, pos)
        return -1 if m is None else m.start()

    def name(self, ids: Ids) -> str | None:
        """The id of the rule that would decide, or None for structure."""
        return self.rules[ids[0]].id if ids[0] < len(self.rules) else None


def patterns_of(ruleset: RuleSet) -> Patterns:
    """The patterns of a rule set, kept with it."""
    known = getattr(ruleset, "_patterns", None)
    if known is None:
        # Rules on a log's last lines are tried there, on each line.
        known = Patterns([r for r in ruleset.rules if r.where != "tail"])
        ruleset._patterns = known  # type: ignore[attr-defined]
    return known


class Shared:
    """What all logs of one diagnosis know together: how much was read, which kinds are seen everywhere, and how many
    bytes at its end of each are read line by line (`tail`), what decorations they have, and how many times on its last
    lines are read (`stamps`, within about `stamp_rows`), and in how many of its first bytes steps are planned (`plan`)."""

    def __init__(self, patterns: Patterns, logs: int = 1) -> None:
        self.patterns = patterns
        self.tail = max(_LEAST_TAIL, min(_TAIL, _TAILS // max(1, logs)))
        self.many = logs > _MANY_LOGS
        self.stamps, self.stamp_rows = (8, 40) if self.many else (40, 400)
        self.plan = (32 if self.many else 256) << 10
        self.decoration = Learner(_FEW_LINES if self.many else SAMPLE_LINES)
        self.metrics = 0
        self.bytes = self.hits = self.reads = self.firsts = 0
        self.known: dict[bytes, Ids] = {}
        self.seen: Counter[Ids] = Counter()
        self.told: Counter[Ids] = Counter()
        self.texts: Counter[Ids] = Counter()
        self.wide: set[int] = set()
        self.writers: dict[Ids, dict[bytes, int]] = {}
        self.samples: dict[Ids, LineSample] = {}

    @property
    def crowded(self) -> bool:
        """Whether triggers are so frequent that not every line with one can be read."""
        return self.patterns.usable and self.hits > _FREE_HITS + self.bytes // BYTES_PER_HIT

    @property
    def very_crowded(self) -> bool:
        """Whether this will be so for long."""
        return self.hits > 2 * (_FREE_HITS + self.bytes // BYTES_PER_HIT)

    @property
    def exhausted(self) -> bool:
        """Whether as many lines were read as their bytes allow: kinds that are known are only counted then."""
        return self.reads > _FREE_READS + self.bytes // _BYTES_PER_READ

    @property
    def few_metrics(self) -> bool:
        """Whether so many metric lines were read at the ends of many logs that of each further log a few are enough."""
        return self.many and self.metrics > _FREE_METRICS

    @property
    def more_writers(self) -> bool:
        """Whether the first line of a kind from yet another rank or node may still be read."""
        return self.firsts < _FREE_WRITERS + self.bytes // _BYTES_PER_WRITER
