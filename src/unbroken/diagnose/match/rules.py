"""Rules as data: what a line means, read from `signatures/*.toml` and from the user's own folders.

A rule is a regular expression on the message (without its prefixes) with a reason or an outcome, a role in the
chain of events, and what to do. Where several fit, the one with the highest priority counts. With google-re2 all
rules are tried in one linear pass; without it Python's `re` runs behind a literal check on lines cut to 2,000
characters.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from ...errors import InputError, UnknownKey, unreadable
from ...progress.records.verdict import HANG, LOSS_SPIKE, REASONS, UNKNOWN, Action, Outcome

FOLDER = Path(__file__).parent / "signatures"
ROLES = ("root", "either", "cascade", "ending", "recovery", "context", "noise")
LONGEST = 2000


@dataclass(frozen=True)
class Rule:
    """One signature. `role`: root (can start a chain), either (a root only where nothing earlier explains it),
    cascade (never a root while anything else is known), ending (how the job ended), recovery (what came before
    was overcome), context, noise. `scope` says what the fault belongs to: gpu, rank, node or job. `where`:
    line, exception (last line of a traceback, or a line that starts with an exception's class), or tail (one of the
    last lines of a log, and no failure after it: how runs end that nobody else reports)."""

    id: str
    regex: str
    role: str
    source: str
    example: str
    reason: str | None = None
    outcome: str | None = None
    where: str = "line"
    scope: str = "job"
    priority: int = 50
    action: str | None = None
    recoverable: bool | None = None
    cordon: bool | None = None
    mitigation: str | None = None
    confidence: float = 0.9

    def __post_init__(self) -> None:
        where = f"rule '{self.id}'"
        if self.role not in ROLES:
            raise InputError(f"'{self.role}' is no role", where=where, hint=f"Use one of: {', '.join(ROLES)}")
        if self.reason is not None and self.reason not in {*REASONS, HANG, LOSS_SPIKE, UNKNOWN}:
            raise InputError(
                f"'{self.reason}' is no reason", where=where, hint=f"Use one of: {', '.join(REASONS)}"
            )
        if self.where not in ("line", "exception", "tail") or self.scope not in (
            "gpu",
            "rank",
            "node",
            "job",
        ):
            raise InputError(
                "`where` is line, exception or tail, `scope` is gpu, rank, node or job", where=where
            )
        if self.action is not None and self.action not in {a.value for a in Action}:
            raise InputError(
                f"'{self.action}' is no action", where=where, hint=f"Use one of: {', '.join(Action)}"
            )
        if self.outcome is not None and self.outcome not in {o.value for o in Outcome}:
            raise InputError(f"'{self.outcome}' is no outcome", where=where)
        compile_safe(self.regex, where)


@dataclass(frozen=True)
class ReasonDefaults:
    """What a reason asks for unless a rule says otherwise."""

    mitigation: str
    action: str = "stop"
    recoverable: bool = False
    cordon: bool = False


@dataclass(frozen=True)
class Xid:
    """What one NVIDIA XID code means for the job."""

    code: int
    group: str
    reason: str
    role: str
    recoverable: bool
    cordon: bool
    action: str
    mitigation: str
    own_fault: str = ""
    """Where a traceback of the same rank fits it, the program is at fault, and a restart meets it again: stop."""
    own_mitigation: str = ""


class Matcher(Protocol):
    """Which patterns fit a text."""

    def __call__(self, text: str) -> list[int]: ...


def compile_safe(pattern: str, where: str) -> re.Pattern[str]:
    """The compiled pattern; raises InputError where it does not compile, is not linear-time, or fits everything."""
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        raise InputError(f"the pattern does not compile: {e}", where=where) from None
    if re.search(r"\(\?(?:[=!]|<[=!])|\\[1-9]", pattern):
        raise InputError(
            "look-around and back references are not linear in time",
            where=where,
            hint="Write the pattern without them",
        )
    if _nested_repeat(pattern):
        raise InputError(
            "a repeat inside a repeat can take exponential time",
            where=where,
            hint="Bound one of them, as in {1,80}",
        )
    if compiled.search("") is not None:
        raise InputError("the pattern fits the empty line, so it fits everything", where=where)
    return compiled


def _nested_repeat(pattern: str) -> bool:
    """Whether an unbounded repeat applies to a group that itself ends in an unbounded repeat, as in (a+)+."""
    try:
        import re._parser as parser  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return False

    def walk(items: Any, inside: bool) -> bool:
        for op, value in items:
            name = str(op)
            if name in ("MAX_REPEAT", "MIN_REPEAT"):
                _low, high, body = value
                many = str(high) == "MAXREPEAT" and not _fixed_start(body)
                if (inside and str(high) == "MAXREPEAT") or walk(body, inside or many):
                    return True
            elif name == "SUBPATTERN":
                if walk(value[-1], inside):
                    return True
            elif name == "BRANCH" and any(walk(branch, inside) for branch in value[1]):
                return True
        return False

    return walk(parser.parse(pattern), False)


def _fixed_start(body: Any) -> bool:
    """Whether each turn of a repeat must begin or end with a literal, which separates its turns."""
    items = list(body)
    while len(items) == 1 and str(items[0][0]) == "SUBPATTERN":
        items = list(items[0][1][-1])
    return len(items) > 1 and any(str(op) == "LITERAL" for op, _ in (items[0], items[-1]))


@functools.cache
def builtin() -> tuple[Rule, ...]:
    """The rules that ship with the package."""
    return load([FOLDER])


def load(folders: Iterable[Path | str]) -> tuple[Rule, ...]:
    """The rules of all `*.toml` files in `folders`; a later rule replaces an earlier one with its id.

    Raises InputError, naming file and rule, where one is wrong.
    """
    rules: dict[str, Rule] = {}
    for folder in folders:
        path = Path(folder)
        files = [path] if path.is_file() else sorted(path.glob("*.toml"))
        if not files and not path.is_dir():
            raise InputError(f"there is no rule folder '{folder}'")
        for file in files:
            if file.parent == FOLDER and file.name in ("xid.toml", "reasons.toml"):
                continue
            for rule in read_rules(file):
                rules[rule.id] = rule
    return tuple(rules.values())


def read_rules(file: Path) -> list[Rule]:
    """The rules of one TOML file."""
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise InputError(f"cannot read rules: {unreadable(e)}", where=str(file)) from None
    known = {f.name for f in fields(Rule)}
    rules = []
    for entry in table.get("rule", []):
        for key in entry:
            if key not in known:
                raise UnknownKey(key, known, where=f"{file}, rule '{entry.get('id', '?')}'")
        missing = [k for k in ("id", "regex", "role", "source", "example") if k not in entry]
        if missing:
            raise InputError(
                f"a rule lacks {', '.join(missing)}", where=f"{file}, rule '{entry.get('id', '?')}'"
            )
        rules.append(Rule(**entry))
    return rules


@functools.cache
def defaults() -> dict[str, ReasonDefaults]:
    """What each reason asks for, from `reasons.toml`."""
    table = tomllib.loads((FOLDER / "reasons.toml").read_text("utf-8"))
    return {name: ReasonDefaults(**entry) for name, entry in table.items()}


@functools.cache
def xids() -> dict[int, Xid]:
    """The XID table, by code."""
    table = tomllib.loads((FOLDER / "xid.toml").read_text("utf-8"))
    return {
        code: Xid(code=code, group=group, **{k: v for k, v in entry.items() if k != "codes"})
        for group, entry in table.items()
        for code in entry["codes"]
    }


class RuleSet:
    """All rules compiled into one matcher."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(sorted(rules, key=lambda r: -r.priority))
        self._tail = tuple(r for r in self.rules if r.where == "tail")
        self._lines = tuple(r for r in self.rules if r.where != "tail")
        self._match = _matcher([r.regex for r in self._lines])
        self._match_tail = _matcher([r.regex for r in self._tail])
        self._loose_tail = loose_set([r.regex for r in self._tail]) if self._tail else None

    def best(self, body: str, *, exception: bool, noise: bool = True) -> Rule | None:
        """The rule with the highest priority that fits `body`; rules on exceptions only where `exception`, noise
        only where `noise` (the last line of a traceback is never only noise)."""
        for index in sorted(self._match(body[:LONGEST])):
            rule = self._lines[index]
            if (exception or rule.where != "exception") and (noise or rule.role != "noise"):
                return rule
        return None

    def at_tail(self, body: str) -> Rule | None:
        """The rule on a log's last lines with the highest priority that fits `body`."""
        return next((self._tail[i] for i in sorted(self._match_tail(body[:LONGEST]))), None)

    def may_be_tail(self, text: str | bytes) -> bool:
        """Whether a rule on a log's last lines can fit any line of `text`."""
        raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
        return self._loose_tail is None or bool(self._loose_tail(raw))

    @staticmethod
    def matcher_of(patterns: Sequence[str]) -> Matcher:
        """A matcher of bare patterns: the indices of those that fit a text."""
        return _matcher(patterns)

    def get(self, rule_id: str) -> Rule | None:
        """The rule of that id."""
        return next((r for r in self.rules if r.id == rule_id), None)

    def with_rules(self, extra: Sequence[Rule]) -> RuleSet:
        """A new set in which `extra` is added, replacing rules of the same id."""
        kept = {r.id: r for r in self.rules} | {r.id: r for r in extra}
        return RuleSet(list(kept.values()))


@functools.cache
def builtin_set() -> RuleSet:
    """The compiled rules that ship with the package."""
    return RuleSet(builtin())


def _matcher(patterns: Sequence[str]) -> Matcher:
    if not patterns:
        return lambda text: []
    loose = loose_set(patterns)
    return _PlainMatcher(patterns) if loose is None else _TwoStages(patterns, loose)


SetMatch = Callable[[bytes], list[int] | None]


def loose_set(patterns: Iterable[str]) -> SetMatch | None:
    """Which of `patterns` may fit somewhere in some bytes, in one fast pass, each `loosen`ed; None without re2."""
    try:
        import re2
    except ImportError:
        return None
    loose = []
    for p in patterns:
        try:
            re2.compile(loosen(p))
            loose.append(loosen(p))
        except re2.error:
            loose.append(p)
    return _re2_set(loose)


Search = Callable[[bytes, int], Any]


def loose_search(pattern: str) -> Search:
    """A search for the first place, from a byte on, where a pattern may fit, loosened as in `loose_set`."""
    import re2

    options = re2.Options()
    options.max_mem = 64 << 20
    options.log_errors = False
    for text in (loosen(pattern), pattern):
        try:
            return re2.compile(text.encode(), options).search  # type: ignore[no-any-return]
        except re2.error:
            continue
    raise AssertionError("loose_set took it")


def _re2_set(patterns: Iterable[str]) -> SetMatch:
    import re2

    options = re2.Options()
    options.max_mem = 64 << 20
    options.log_errors = False
    matcher = re2.Set.SearchSet(options)
    for p in patterns:
        matcher.Add(p)
    matcher.Compile()
    return matcher.Match  # type: ignore[no-any-return]


_REPEAT = re.compile(r"\{\d*,\d*\}")
_OPTIONAL_START = re.compile(r"\(\?:\[\\w\.\]\+\\\.\)\?|\\s\*|\.\*\??|\\b")


def loosen(pattern: str) -> str:
    """An expression that fits wherever `pattern` fits, on whatever line the message stands, and that runs fast:
    without `^`, `$`, an optional start, and with `*` for bounded repeats, whose counters cost an automaton dearly."""
    out, i, inside = [], 0, False
    while i < len(pattern):
        c = pattern[i]
        if c == "\\":
            out.append(pattern[i : i + 2])
            i += 2
            continue
        if inside:
            inside = c != "]" or pattern[i - 1] == "[" or pattern[i - 2 : i] == "[^"
        elif c == "[":
            inside = True
        elif c in "^$":
            i += 1
            continue
        elif c == "{" and (m := _REPEAT.match(pattern, i)):
            out.append("*")
            i = m.end()
            continue
        out.append(c)
        i += 1
    text = "".join(out)
    while m := _OPTIONAL_START.match(text):
        text = text[m.end() :]
    return text


class _TwoStages:
    """All patterns loosely in one pass, then those that may fit one by one: a pass over all of them as they are is
    slow on text that it has not seen, because their bounded repeats make new states of the automaton."""

    def __init__(self, patterns: Sequence[str], loose: SetMatch) -> None:
        self._patterns, self._loose = patterns, loose
        self._exact: dict[int, SetMatch] = {}

    def __call__(self, text: str) -> list[int]:
        data = text.encode("utf-8", "replace")
        found = self._loose(data)
        return [i for i in found if self._fits(i, data)] if found else []

    def _fits(self, index: int, data: bytes) -> bool:
        exact = self._exact.get(index)
        if exact is None:
            # A set of one: several times faster than a search that would also say where it fits.
            exact = self._exact[index] = _re2_set([self._patterns[index]])
        return bool(exact(data))


class _PlainMatcher:
    """All patterns in turn with Python's `re`."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._compiled = [re.compile(p) for p in patterns]

    def __call__(self, text: str) -> list[int]:
        return [i for i, p in enumerate(self._compiled) if p.search(text)]


def candidate(rule: Rule) -> Rule:
    """The rule as a candidate: weaker than any that was confirmed."""
    return replace(rule, priority=min(rule.priority, 30), confidence=min(rule.confidence, 0.6))
