"""Whether words stand in somebody's text (a sample, a prompt, generated code) and not in the log's own voice."""

from __future__ import annotations

import re

_TALK = re.compile(
    r"(?i)^\W{0,8}(?:[\w.\-]{1,24}[:\]|]\s+){0,2}\W{0,3}"
    r"(?:eval[ _])?(?:model[ _])?(?:completions?|generat(?:ed|ions?)(?:[ _]text)?|samples?|prompts?|responses?|rollouts?|decoded|assistant|human|hypothes[ei]s|predictions?|chosen|rejected|documents?|doc|row text|snippets?|transcript|question|instruction|answer|dialogue|turn|example|model output|input_text|output_text|target_text)"
    r"[ _]?(?:text|id|no\.?)?\s?(?:was|is)?\s?[\[(#]?\d{0,9}[\])]?\s*(?:[:=|\u203a\u00bb]|->|=>|>{1,3}|<<)"
)
_OPENING = re.compile("[\"`\u201c\u00ab]|<<|'{3}")
FENCE = b"```"
_LINES_ABOVE, _LINES_BELOW = 8 << 10, 32 << 10


def is_talk(body: str) -> bool:
    """Whether a message begins as a sample of text does (`sample 3: ...`, `prompt> ...`, `### Assistant: ...`)."""
    return _TALK.match(body) is not None


def is_open_before(text: str, at: int) -> bool:
    """Whether a quotation opens before `at` and does not close before it."""
    before = text[:at]
    if not _OPENING.search(before):
        return False
    return (
        before.count('"') % 2 == 1
        or before.count("`") % 2 == 1
        or before.count("\u201c") > before.count("\u201d")
        or before.count("\u00ab") > before.count("\u00bb")
        or before.count("<<") > before.count(">>")
        or before.count("'''") % 2 == 1
    )


def is_fenced(block: bytes, at: int) -> bool:
    """Whether byte `at` lies between two fences of a code listing; one that nobody closes hides nothing."""
    above = block[max(0, at - _LINES_ABOVE) : at]
    if above.count(FENCE) % 2 == 0:
        return False
    return block.find(FENCE, at, at + _LINES_BELOW) >= 0
