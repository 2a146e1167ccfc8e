"""Whether a value is a secret, from the value alone: no placeholder, no number, random rather than named."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

_NOTHING = re.compile(
    r"(?i)(?:none|null|nil|true|false|yes|no|n/a|empty|unset|set|not|missing|invalid|expired|required|redacted|hidden|masked|str|int|bool|string|bytes|optional\S*|auto|default|\*+|x+|\.+|-+|<[^>]*>?|\$\{?\w*\}?|%\w*%|\{\{.*|\{\w*\}?|\[\w*\]?|\(\w*\)?)[.,;]?"
)
_UUID = re.compile(r"(?i)(?:[a-z]{2,5}-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:[\-_]\w+)?")


def holds(value: str) -> bool:
    """Whether a value whose name says that it is secret can be one: no placeholder, no number, long enough."""
    return len(value) >= 4 and not is_plain(value) and not is_number(value)


def is_strange(value: str) -> bool:
    """Whether a value that stands alone looks like a token: random, or long with letters and digits mixed."""
    return looks_random(value, 0.25) or (len(value) >= 12 and is_mixed(value) and not is_described(value))


def is_plain(value: str) -> bool:
    """Whether it stands for no secret: a placeholder, a type, a word like `none`."""
    return _NOTHING.fullmatch(value) is not None


def is_number(value: str) -> bool:
    return re.fullmatch(r"[+-]?[\d.,_]+(?:e[+-]?\d+)?[%a-zA-Z]{0,3}(?:/s|/\w{1,6})?", value) is not None


def is_mixed(value: str) -> bool:
    """Whether a value has letters, digits and no words that a log would say: `hunter22`, `S3cr3t!`."""
    return re.search(r"[A-Za-z]", value) is not None and re.search(r"\d", value) is not None


def is_described(value: str) -> bool:
    """Whether a value is a name, a number with a unit, a place in code or an address rather than a key."""
    return re.search(r"[:/.][\w\-]+[:/.]|^\w+\.(?:py|json|txt|log|cc|cu|cpp)\b|^[A-Z]?[a-z]+_?[\d.]{1,4}$|^[a-z]+(?:[_\-][a-z]+)*(?:[_\-]\d+)?$", value) is not None  # fmt: skip


def looks_random(value: str, least: float) -> bool:
    """Whether a text is random rather than named; `least` is the share of changes between digits and cases.

    Random letters and digits change their class at 62 % of their places, words at under 30 %. Hexadecimal is a hash.
    """
    if re.fullmatch(r"(?:0x)?[0-9a-fA-F]+(?:-[0-9]+)?|[\d\W_]+", value) or _UUID.fullmatch(value):
        return False
    if value.startswith(("_Z", "sha256", "GPU-", "MIG-")) or "+0x" in value:
        return False
    body = value.rstrip("=")
    if re.fullmatch(r"[a-z2-7]{40,}", body):  # a hash in base32, as compilers name their caches
        return False
    runs = [r for r in re.findall(r"[A-Za-z0-9]+", body) if not re.fullmatch(r"[0-9a-f]{8,}|[0-9A-F]{8,}", r)]
    letters = "".join(runs)
    if len(letters) < 16:
        return False
    longest = max(map(len, runs))  # in pieces of a name only a long one can be a key
    if longest < 12 and len(letters) / len(runs) < 8:
        return False
    classes = ["u" if c.isupper() else "l" if c.islower() else "d" for c in letters]
    counts = Counter(classes)
    changes = sum(a != b for a, b in itertools.pairwise(classes)) / (len(classes) - 1)
    if counts["u"] >= 2 and counts["l"] >= 2 and (counts["d"] >= 2 or len(letters) >= 24):
        return changes >= least and _bits(letters) >= 3.2
    mixed = counts["d"] >= 4 and max(counts["u"], counts["l"]) >= 8
    return mixed and longest >= 24 and changes >= max(0.3, least - 0.15) and _bits(letters) >= 3.6


def _bits(text: str) -> float:
    """Shannon entropy of the characters, in bits a character."""
    n = len(text)
    return -sum(c / n * math.log2(c / n) for c in Counter(text).values())
