"""Generated secrets of every kind in secrets.toml, as (kind, lines of a log, what must not be seen)."""

from __future__ import annotations

import base64
import random
import re
import string
import tomllib
from pathlib import Path

_ALPHABET = {
    "an": string.ascii_letters + string.digits, "hex": "0123456789abcdef", "up": string.ascii_uppercase + string.digits,
    "low": string.ascii_lowercase, "dig": string.digits, "b64": string.ascii_letters + string.digits + "+/",
}  # fmt: skip


def kinds(part: str = "kinds") -> dict[str, str]:
    """Templates by kind."""
    table: dict[str, str] = tomllib.loads((Path(__file__).parent / "secrets.toml").read_text())[part]
    return table


def generate(template: str, seed: int) -> tuple[str, list[str]]:
    """The text of a template, and the pieces of it that are secret (without what hides or breaks them)."""
    rng = random.Random(seed)

    def fill(m: re.Match[str]) -> str:
        kind, _, n = m.group(1).partition(":")
        if kind == "word":
            return "".join(rng.choice("bcdfgklmnprstvz" if i % 2 else "aeiou") for i in range(8))
        if kind == "esc":
            return "\x1b[31m"
        if kind == "zw":
            return rng.choice("\u200b\u200c\u200d\u2060\ufeff")
        if kind == "basic":
            return base64.b64encode(f"svc:{rng.getrandbits(48):x}".encode()).decode()
        if kind == "b64secret":
            return base64.b64encode(f"password={rng.getrandbits(48):x}".encode()).decode()
        text = "".join(rng.choice(_ALPHABET[kind]) for _ in range(int(n)))
        if kind == "an" and int(n) >= 8:  # as issuers' generators nearly always give
            return (
                text[:-3]
                + rng.choice(string.ascii_uppercase)
                + rng.choice(string.ascii_lowercase)
                + rng.choice(string.digits)
            )
        return text

    filled = re.sub(r"\{(\w+(?::\d+)?)\}", fill, template)
    secret = re.findall(r"«(.*?)»", filled, re.S)
    pieces = [
        p
        for s in secret
        for p in re.split(r"\x1b\[31m|[\u200b-\u200d\u2060\ufeff]|[\"\\]*\n(?:\[rank\d\]: )?\s*\"?|\\n", s)
    ]
    return filled.replace("«", "").replace("»", ""), [p for p in pieces if len(p) >= 4]


def seen(piece: str, text: str) -> bool:
    """Whether a piece, or most of it (six characters and two thirds of it in a row), is in a text."""
    n = max(6, len(piece) * 2 // 3)
    if len(piece) > 24:
        n = 10
    return any(piece[i : i + n] in text for i in range(max(1, len(piece) - n + 1)))
