"""Conversations and preferences from JSON lines: bytes in a plain template, of which the answers alone are learnt.

Supervised: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} a line, as chat data
sets have them. Preferences: {"prompt": "..." or messages, "chosen": "...", "rejected": "..."} a line. The template is
"role: content" and a newline; an answer ends with a zero byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from .samples import IGNORED, PackedSamples

ROLES = ("system", "user", "assistant")
Piece = tuple[bytes, bool]
"""Text, and whether it is to be learnt."""


@dataclass(frozen=True)
class Conversations:
    """A file of conversations or preferences, packed for one length of sequence."""

    path: Path
    count: int
    """Bytes of text."""
    fingerprint: str
    source: str
    samples: PackedSamples


def open_conversations(path: Path, seq: int) -> Conversations:
    """Reads conversations and packs them: each is in one row whole, rows are filled first-fit in the file's order.

    A conversation sees those before it in its row. Raises InputError, with the line, for what is no conversation or longer
    than a row.
    """
    rows: list[list[tuple[int, bool]]] = []
    room: list[int] = []
    digest, count = hashlib.sha256(), 0
    for number, value in _lines(path):
        flat = _flat(_messages(value, path, number))
        _check_length(flat, seq, path, number)
        digest.update(bytes(t for t, _ in flat) + b"\n")
        count += len(flat)
        at = next((i for i in range(max(0, len(rows) - 64), len(rows)) if room[i] >= len(flat)), None)
        if at is None:
            rows.append([])
            room.append(seq + 1)
            at = len(rows) - 1
        rows[at] += flat
        room[at] -= len(flat)
    return Conversations(path, count, digest.hexdigest(), str(path), _packed(rows, seq, 1))


def open_preferences(path: Path, seq: int) -> Conversations:
    """Reads preferences: two rows each, the chosen and the rejected answer to one prompt. Raises InputError."""
    rows = []
    digest, count = hashlib.sha256(), 0
    for number, value in _lines(path):
        prompt = value.get("prompt")
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for key in ("chosen", "rejected"):
            answer = {"role": "assistant", "content": value.get(key)}
            flat = _flat(
                _messages(
                    {"messages": [*(asked if isinstance(asked, list) else [None]), answer]}, path, number
                )
            )
            _check_length(flat, seq, path, number)
            last = len(flat) - len(_answer(str(value[key])))
            rows.append([(t, i >= last) for i, (t, _) in enumerate(flat)])
            digest.update(bytes(t for t, _ in flat) + b"\n")
            count += len(flat)
    return Conversations(path, count, digest.hexdigest(), str(path), _packed(rows, seq, 2))


def render(messages: list[dict[str, str]]) -> bytes:
    """The prompt that a model trained on this template continues with its answer."""
    return b"".join(text for text, _ in _pieces(messages)) + b"assistant: "


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    value = json.loads(line)
                    if not isinstance(value, dict):
                        raise ValueError("no JSON object")
                    yield number, value
    except OSError as e:
        raise InputError(f"the conversations cannot be read: {e.strerror}", where=str(path)) from e
    except ValueError as e:
        raise InputError(f"it is no JSON lines: {e}"[:300], where=str(path)) from e


def _messages(value: dict[str, Any], path: Path, number: int) -> list[dict[str, str]]:
    messages = value.get("messages")
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in messages
    )
    if not good or not any(m["role"] == "assistant" for m in messages or ()):
        raise InputError(
            "it is no conversation with an answer",
            where=f"{path}, line {number}",
            hint='A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, '
            'with --task dpo {"prompt": "...", "chosen": "...", "rejected": "..."}',
        )
    return list(messages or ())


def _pieces(messages: list[dict[str, str]]) -> list[Piece]:
    found: list[Piece] = []
    for m in messages:
        found.append((f"{m['role']}: ".encode(), False))
        if m["role"] == "assistant":
            found.append((_answer(m["content"]), True))
        else:
            found.append((m["content"].encode() + b"\n", False))
    return found


def _answer(content: str) -> bytes:
    return content.encode() + b"\0"


def _flat(messages: list[dict[str, str]]) -> list[tuple[int, bool]]:
    return [(byte, learnt) for text, learnt in _pieces(messages) for byte in text]


def _check_length(flat: list[tuple[int, bool]], seq: int, path: Path, number: int) -> None:
    if len(flat) > seq + 1:
        raise InputError(
            f"a conversation of {len(flat)} bytes does not go into a row of {seq + 1}",
            where=f"{path}, line {number}",
            hint=f"A longer --seq (at least {len(flat) - 1}), or shorter conversations",
        )


def _packed(rows: list[list[tuple[int, bool]]], seq: int, rows_each: int) -> PackedSamples:
    tokens = np.zeros((len(rows), seq + 1), np.int64)
    learnt = np.zeros((len(rows), seq + 1), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = [t for t, _ in row]
        learnt[i, : len(row)] = [x for _, x in row]
    return PackedSamples(tokens[:, :-1], np.where(learnt[:, 1:], tokens[:, 1:], IGNORED), rows_each)
