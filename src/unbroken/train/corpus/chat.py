"""Conversations and preferences from JSON lines, of which the answers alone are learnt.

Supervised: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} a line, as chat data
sets have them. Preferences: {"prompt": "..." or messages, "chosen": "...", "rejected": "..."} a line. The template is that of the
tokenizer if it has one; else "role: content" and a newline, where an answer ends with the token that ends a text: of bytes the zero.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from .samples import IGNORED, PackedSamples
from .tokenize import load_tokenizer

ROLES = ("system", "user", "assistant")
Flat = list[tuple[int, bool]]
"""Tokens, and whether each is to be learnt."""
Tokenize = Callable[[list[dict[str, str]]], Flat]
"""A conversation as its tokens; raises ValueError, saying why, for one that it cannot take."""


@dataclass(frozen=True)
class Conversations:
    """A file of conversations or preferences, packed for one length of sequence."""

    path: Path
    count: int
    """Bytes of text."""
    fingerprint: str
    source: str
    samples: PackedSamples


def open_conversations(path: Path, seq: int, tokenizer: str = "bytes", vocab: int = 256) -> Conversations:
    """Reads conversations and packs them: each is in one row whole, rows are filled first-fit in the file's order.

    A conversation sees those before it in its row. Raises InputError, with the line, for what is no conversation, longer than a
    row, or has a token outside of the vocabulary.
    """
    rows: list[Flat] = []
    room: list[int] = []
    reader = _Reader(path, seq, tokenizer, vocab)
    for number, value in _lines(path):
        flat = reader.flat(_messages(value, path, number), number)
        at = next((i for i in range(max(0, len(rows) - 64), len(rows)) if room[i] >= len(flat)), None)
        if at is None:
            rows.append([])
            room.append(seq + 1)
            at = len(rows) - 1
        rows[at] += flat
        room[at] -= len(flat)
    return reader.packed(rows, 1)


def open_preferences(path: Path, seq: int, tokenizer: str = "bytes", vocab: int = 256) -> Conversations:
    """Reads preferences: two rows each, the chosen and the rejected answer to one prompt. Raises InputError."""
    rows = []
    reader = _Reader(path, seq, tokenizer, vocab)
    for number, value in _lines(path):
        prompt = value.get("prompt")
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for key in ("chosen", "rejected"):
            answer = {"role": "assistant", "content": value.get(key)}
            messages = {"messages": [*(asked if isinstance(asked, list) else [None]), answer]}
            flat = reader.flat(_messages(messages, path, number), number)
            # Only the last answer is compared: those before it are part of the prompt.
            last = max((i for i, (_, learnt) in enumerate(flat) if not learnt), default=-1)
            rows.append([(t, i > last) for i, (t, _) in enumerate(flat)])
    return reader.packed(rows, 2)


class _Reader:
    """Makes tokens of conversations, and remembers their fingerprint."""

    def __init__(self, path: Path, seq: int, tokenizer: str, vocab: int) -> None:
        self._path, self._seq, self._vocab = path, seq, vocab
        self._bytes = tokenizer == "bytes"
        self._tokenize = of_bytes if self._bytes else template_of(tokenizer)
        self._digest, self._count = hashlib.sha256(), 0

    def flat(self, messages: list[dict[str, str]], number: int) -> Flat:
        """The tokens of one conversation. Raises InputError."""
        where = f"{self._path}, line {number}"
        try:
            flat = self._tokenize(messages)
        except ValueError as e:
            raise InputError(f"the tokenizer's template cannot take it: {str(e)[:200]}", where=where) from e
        if len(flat) > self._seq + 1:
            raise InputError(
                f"a conversation of {len(flat)} {'bytes' if self._bytes else 'tokens'} does not go into a row of {self._seq + 1}",
                where=where,
                hint=f"A longer --seq (at least {len(flat) - 1}), or shorter conversations",
            )
        largest = max((t for t, _ in flat), default=0)
        if largest >= self._vocab:
            raise InputError(
                f"token {largest} is not in a vocabulary of {self._vocab}: the model is for another tokenizer",
                where=where,
                hint=f"--vocab {largest + 1} or more, as the tokenizer has, or the --tokenizer of this model",
            )
        tokens = [t for t, _ in flat]
        self._digest.update(
            (bytes(tokens) if self._bytes else np.asarray(tokens, np.uint32).tobytes()) + b"\n"
        )
        self._count += len(flat)
        return flat

    def packed(self, rows: list[Flat], rows_each: int) -> Conversations:
        """All of them, as rows."""
        tokens = np.zeros((len(rows), self._seq + 1), np.int64)
        learnt = np.zeros((len(rows), self._seq + 1), bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = [t for t, _ in row]
            learnt[i, : len(row)] = [x for _, x in row]
        samples = PackedSamples(tokens[:, :-1], np.where(learnt[:, 1:], tokens[:, 1:], IGNORED), rows_each)
        return Conversations(self._path, self._count, self._digest.hexdigest(), str(self._path), samples)


def of_bytes(messages: list[dict[str, str]]) -> Flat:
    """A conversation in the plain template, as bytes."""
    return [
        (byte, learnt)
        for m in messages
        for text, learnt in _pieces(m, lambda answer: answer.encode() + b"\0")
        for byte in text
    ]


def render(messages: list[dict[str, str]]) -> bytes:
    """The prompt that a model trained on this template continues with its answer."""
    return bytes(t for t, _ in of_bytes(messages)) + b"assistant: "


def template_of(tokenizer: str) -> Tokenize:
    """How conversations become tokens of a tokenizer of Hugging Face. Raises InputError where there is none, MissingExtra."""
    found = load_tokenizer(tokenizer)

    def encode(text: str) -> list[int]:
        return list(found(text, add_special_tokens=False)["input_ids"])

    def end(answer: str) -> list[int]:
        return encode(answer) + ([] if found.eos_token_id is None else [found.eos_token_id])

    def plain(messages: list[dict[str, str]]) -> Flat:
        return [
            (token, learnt)
            for m in messages
            for text, learnt in _pieces(m, end)
            for token in (text if isinstance(text, list) else encode(text.decode()))
        ]

    def its_own(messages: list[dict[str, str]]) -> Flat:
        flat: Flat = []
        for i, m in enumerate(messages):
            if m["role"] != "assistant":
                continue
            # What stands before an answer, and what stands after it: between them is the answer, with what ends it.
            asked, told = (
                list(found.apply_chat_template(messages[:n], add_generation_prompt=n == i, tokenize=True, return_dict=False))
                for n in (i, i + 1)
            )  # fmt: skip
            if told[: len(asked)] != asked or [t for t, _ in flat] != asked[: len(flat)]:
                raise ValueError("it changes what stood before an answer when the answer is there")
            flat += [(t, False) for t in asked[len(flat) :]] + [(t, True) for t in told[len(asked) :]]
        return flat

    return its_own if found.chat_template else plain


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


def _pieces(m: dict[str, str], end: Callable[[str], Any]) -> list[tuple[Any, bool]]:
    """A message in the plain template: its role, then its text, and whether each is to be learnt; `end` makes an answer of a text."""
    role = f"{m['role']}: ".encode()
    if m["role"] == "assistant":
        return [(role, False), (end(m["content"]), True)]
    return [(role + m["content"].encode() + b"\n", False)]
