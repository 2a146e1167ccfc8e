"""Whether a log's last lines show a run that reached its end, where no scheduler and no trainer says so in usual words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from .rules import Rule, RuleSet

TAIL_LINES = 80
_PAIR = re.compile(r"(\d+)\s?/\s*(\d+)\b")
_COUNTED = re.compile(
    r"(?:\b(?:steps?|iter(?:ation)?s?|batch(?:es)?|updates?|it)['\"]?\s*[:= ]?\s*|\[\w+=|\| |^\s*)$"
)  # what stands before such a pair
_OF, _DONE, _ANSI = (
    re.compile(rb"/\s*(\d{1,18})"),
    re.compile(rb"(\d{1,18})\s?$"),
    re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]"),
)
_PLAN = re.compile(
    rb"(?i)\b(?:(?:max|total|num|train|training)_?(?:train(?:ing)?_)?(?:iters|iterations|steps|updates?)|total optimization steps)['\"]?\s*[:= .]+\s*(\d[\d,_]{1,12})\b"
)
_PLAN_WORDS = (b"iters", b"iterations", b"steps", b"update")
_STAMP = re.compile(r"\d[\d:.,TZ+\-]{6,}")
_SIGNS = re.compile(r"(?:[^\s\w]*(?:stderr|stdout|[FP]|\S*[\-\d<>\[\]|:]\S*)\s+)+(?:\|\s+)?")
_HEADER = re.compile(r"(?i)\bepoch\W{0,3}(\d+)\s*(?:/|of)\s*(\d+)")
_RATE, _LEARNING = re.compile(r"lr['\"]?\s*[:=]?\s*0"), re.compile(r"learning[_ ]rate['\"]?\s*[:=]?\s*0")
_ETA = re.compile(r"eta\W{1,3}[0:]")
OF_EPOCH = re.compile(r"(?i)\bepoch\W{0,3}\d+\b")
_EPOCH = re.compile(r"(?i)\bepochs?\W{0,3}\s*$")
_RATE_ZERO = re.compile(r"\b(?:lr|learning[_ ]rate)['\"]?\s*[:=]?\s*0(?:\.0*)?(?:[eE][+-]?0+)?(?![\d.eE])")
_ETA_ZERO = re.compile(r"(?i)\beta\W{1,3}0?0?:?0?0:00\b(?!:)|\beta\W{1,3}0:00:00\b")

FULL_COUNT = Rule(
    id="last-step", regex=r"step \d+/\d+", role="ending", outcome="completed", where="tail", confidence=0.75,
    source="https://huggingface.co/docs/transformers/main_classes/trainer", example="step 4000/4000",
)  # fmt: skip
LAST_OF_PLAN = replace(FULL_COUNT, id="last-step-of-plan")
LAST_EPOCH = replace(FULL_COUNT, id="last-epoch", confidence=0.7)
SCHEDULE_OVER = Rule(
    id="schedule-over", regex=r"lr 0", role="ending", outcome="completed", where="tail", confidence=0.6,
    source="https://docs.pytorch.org/docs/stable/optim.html", example="step 4000 loss 2.1 lr 0.0",
)  # fmt: skip


def completion(
    rows: Sequence[tuple[int, str]], rules: RuleSet, last_step: float | None
) -> tuple[int, str, Rule] | None:
    """The line (number, text) among the last ones that shows the end of the run, and by which rule; the surest first,
    then the earliest."""
    found: list[tuple[int, str, Rule]] = []
    rows = rows[-TAIL_LINES:]
    cut = _tag_of([text for _, text in rows])
    together = "\n".join(
        text[cut:] for _, text in rows
    )  # most tails hold nothing of the kind: three looks show it
    ruled = rules.may_be_tail(together) or (
        cut > 0 and rules.may_be_tail("\n".join(text for _, text in rows))
    )
    over = _may_be_over(together)
    counted = "/" in together
    counts = [_counts(text[cut:]) if counted else [] for _, text in rows]
    again = _restarted(counts)
    epoch: tuple[int, int] | None = None
    for (number, whole), pairs in zip(rows, counts, strict=True):
        text = whole[cut:]
        rule = (rules.at_tail(whole) or (rules.at_tail(text) if cut else None)) if ruled else None
        header = _HEADER.search(text, 0, 200) if counted else None
        if header:
            epoch = int(header.group(1)), int(header.group(2))
        full = any(c.done == c.of for c in pairs)
        if rule is not None:
            found.append((number, whole, rule))
        elif (
            full
            and epoch is None
            and again.isdisjoint(c.of for c in pairs)
            and is_full(text, last_step, pairs)
        ):
            found.append((number, whole, FULL_COUNT))
        elif full and epoch is not None and epoch[0] == epoch[1] > 1 and _all_of(text, pairs):
            found.append((number, whole, LAST_EPOCH))
        elif over and (_RATE_ZERO.search(text) or _ETA_ZERO.search(text)):
            found.append((number, whole, SCHEDULE_OVER))
    best = max((f[2].confidence for f in found), default=0.0)
    return next((f for f in found if f[2].confidence == best), None)


def _tag_of(texts: Sequence[str]) -> int:
    """The length of the tag that all of the last lines begin with (`trainer-1  | `, `<web-4> `), where it is no words."""
    if len(texts) < 3:
        return 0
    starts = [_STAMP.sub("0", t[:120]) for t in texts]
    low, high = min(starts), max(starts)  # what these two share, all share
    common = low[
        : next(
            (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
        )
    ]
    common = common[: common.rfind(" ") + 1]
    shape = _SIGNS.fullmatch(common)
    if not common or shape is None:
        return 0
    if "0" not in common:
        return len(common)
    found = [re.match(re.escape(common).replace("0", r"[\d:.,TZ+\-]+", 1), t) for t in texts]
    lengths = {m.end() for m in found if m is not None}
    return lengths.pop() if len(lengths) == 1 and all(found) else 0


class _Count(NamedTuple):
    """A count of steps in a line, whose first number begins at character `at`."""

    at: int
    done: int
    of: int


def _counts(text: str) -> list[_Count]:
    """The counts of steps (`step 3/10`, `[it=3/10`, `| 3/10`) at the start of a line."""
    text = text[:300]
    if "/" not in text:
        return []
    return [
        _Count(m.start(), int(m.group(1)), int(m.group(2)))
        for m in _PAIR.finditer(text)
        if _COUNTED.search(text, max(0, m.start() - 64), m.start())
    ]


def _restarted(rows: Iterable[Sequence[_Count]]) -> set[int]:
    """The totals that are counted more than once from the start: those of an epoch, not of the run."""
    most: dict[int, int] = {}
    out: set[int] = set()
    for row in rows:
        for _, done, of in row:
            if done < most.get(of, 0) / 2:  # ranks that write into one log are a few steps apart
                out.add(of)
            most[of] = max(done, most.get(of, 0))
    return out


def _may_be_over(text: str) -> bool:
    # The first expressions begin with letters, which are found many times faster than what the second ones ask.
    if (_RATE.search(text) or _LEARNING.search(text)) and _RATE_ZERO.search(text):
        return True
    return _ETA.search(text.lower()) is not None and _ETA_ZERO.search(text) is not None


def is_full(text: str, last_step: float | None, pairs: Iterable[_Count] | None = None) -> bool:
    """Whether a line counts the last of all steps (`step 4000/4000`, `3000/3000 [2:32:00<00:00`); `pairs` are its
    counts where they are known."""
    if OF_EPOCH.search(text, 0, 200):
        return False  # of one epoch, and nobody says of how many
    for at, done, of in _counts(text) if pairs is None else pairs:
        if done == of and of >= 10 and not _EPOCH.search(text[:at]):
            return last_step is None or of >= 0.95 * last_step or of >= 100
    return False


def _all_of(text: str, pairs: Iterable[_Count]) -> bool:
    """Whether a line counts the last batch of its epoch."""
    return any(done == of for at, done, of in pairs if not _EPOCH.search(text[:at]))


def may_be_complete(tail: bytes, rules: RuleSet) -> bool:
    """Whether `completion` can find anything in a log's last lines, before they are taken apart: a rule on endings
    that may fit, a count that is full, or a rate or remaining time of zero."""
    if b"\\" in tail:  # text within JSON
        if b"\\u" in tail:
            return True
        tail = tail.replace(b"\\n", b"\n").replace(b"\\t", b"\t").replace(b"\\", b"")
    if b"\0" in tail or b"\x1b" in tail:
        tail = _ANSI.sub(b"", tail.replace(b"\0", b""))
    if rules.may_be_tail(tail):
        return True
    for m in _OF.finditer(tail):
        at, last = m.start(), tail[m.end() - 1]
        if last != tail[at - 1] and (at < 2 or last != tail[at - 2]):
            continue  # equal numbers end alike
        done = _DONE.search(tail, max(0, m.start() - 24), m.start())
        if done is not None and int(done[1]) == int(m[1]):
            return True
    return _may_be_over(tail.decode("utf-8", "replace"))


def planned(head: bytes) -> frozenset[int]:
    """The numbers of steps that a log's first lines plan for (`max_iters = 5000`, `train_iters ..... 500`)."""
    found = set()
    low = head.lower()
    # Few lines name steps: the whole expression is tried around those words only.
    for word in _PLAN_WORDS:
        at = low.find(word)
        while at >= 0:
            m = _PLAN.search(head, max(0, at - 40), at + 60)
            if m is not None:
                found.add(int(re.sub(rb"\D", b"", m[1])))
            at = low.find(word, at + len(word))
    return frozenset(n for n in found if n >= 10)
