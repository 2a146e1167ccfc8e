"""Whether a log's last lines show a run that reached its end, where no scheduler and no trainer says so in usual words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .rules import Rule, RuleSet

TAIL_LINES = 80
_COUNT = re.compile(
    r"(?:\b(?:steps?|iter(?:ation)?s?|batch(?:es)?|updates?|it)['\"]?\s*[:= ]?\s*|\[\w+=|\| |^\s*)(\d+)\s?/\s*(\d+)\b"
)
_EPOCH = re.compile(r"(?i)\bepochs?\W{0,3}\s*$")
_RATE_ZERO = re.compile(r"\b(?:lr|learning[_ ]rate)['\"]?\s*[:=]?\s*0(?:\.0*)?(?:[eE][+-]?0+)?(?![\d.eE])")
_ETA_ZERO = re.compile(r"(?i)\beta\W{1,3}0?0?:?0?0:00\b(?!:)|\beta\W{1,3}0:00:00\b")

FULL_COUNT = Rule(
    id="last-step", regex=r"step \d+/\d+", role="ending", outcome="completed", where="tail", confidence=0.75,
    source="https://huggingface.co/docs/transformers/main_classes/trainer", example="step 4000/4000",
)  # fmt: skip
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
    together = "\n".join(text for _, text in rows)  # most tails hold nothing of the kind: three looks show it
    ruled = rules.may_be_tail(together)
    over = _RATE_ZERO.search(together) or _ETA_ZERO.search(together)
    for number, text in rows:
        rule = rules.at_tail(text) if ruled else None
        if rule is not None:
            found.append((number, text, rule))
        elif "/" in text and is_full(text, last_step):
            found.append((number, text, FULL_COUNT))
        elif over and (_RATE_ZERO.search(text) or _ETA_ZERO.search(text)):
            found.append((number, text, SCHEDULE_OVER))
    best = max((f[2].confidence for f in found), default=0.0)
    return next((f for f in found if f[2].confidence == best), None)


def is_full(text: str, last_step: float | None) -> bool:
    """Whether a line counts the last of all steps (`step 4000/4000`, `3000/3000 [2:32:00<00:00`)."""
    for m in _COUNT.finditer(text[:300]):
        done, of = int(m.group(1)), int(m.group(2))
        if done == of and of >= 10 and not _EPOCH.search(text[: m.start(1)]):
            return last_step is None or of >= 0.95 * last_step or of >= 100
    return False
