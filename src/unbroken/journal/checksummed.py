"""JSON that proves itself whole: `{"check":"<xxh3_64 of all that follows>", ...}`, and strict reading of it.

A torn write, a flipped bit or a mix of two files never parses. It stays plain JSON for every other tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from ..errors import CheckpointCorrupt, CheckpointTooNew

SCHEMA = 1
_HEAD = b'{"check":"'
_TAIL = b'",'
_PREFIX = len(_HEAD) + 16 + len(_TAIL)


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3_64 in 16 hex digits: finds every torn or flipped byte in practice; no defence against forgery."""
    return xxhash.xxh3_64_hexdigest(data)


def encode_checked(kind: str, body: Mapping[str, Any]) -> bytes:
    """The bytes of a checksummed JSON file of this kind.

    Keys are sorted at the top only: deeper down their order is the user's (a dict comes back in its order).
    """
    whole = dict(sorted({"kind": kind, "schema": SCHEMA, **body}.items()))
    rest = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    tail = rest[1:].encode() + b"\n"
    return _HEAD + digest(tail).encode() + _TAIL + tail


def decode_checked(data: bytes, kind: str, *, where: str) -> Fields:
    """The fields of a checksummed file.

    Raises CheckpointCorrupt if a byte differs or another kind is found, CheckpointTooNew for a newer schema.
    """
    if len(data) <= _PREFIX or data[: len(_HEAD)] != _HEAD or data[_PREFIX - 2 : _PREFIX] != _TAIL:
        raise CheckpointCorrupt("the file is torn or was not written by unbroken", where=where)
    if digest(memoryview(data)[_PREFIX:]).encode() != data[len(_HEAD) : _PREFIX - 2]:
        raise CheckpointCorrupt("the file differs from its own checksum (torn or flipped bits)", where=where)
    try:
        value = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as e:
        raise CheckpointCorrupt(f"the file is not valid JSON: {e}"[:300], where=where) from None
    fields = Fields(value, where)
    if fields.text("kind") != kind:
        raise CheckpointCorrupt(f"expected a {kind}, found a {fields.text('kind')}"[:300], where=where)
    schema = fields.natural("schema")
    if schema > SCHEMA:
        raise CheckpointTooNew(
            f"written in schema {schema}, this version reads up to {SCHEMA}",
            where=where,
            hint="Use the version of unbroken that wrote it, or a newer one",
        )
    return fields


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class Fields:
    """A JSON object read strictly: each access checks the type and raises CheckpointCorrupt, naming the key."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise CheckpointCorrupt("expected a JSON object", where=where)
        self.value: dict[str, Any] = value
        self.where = where

    def _wrong(self, key: str, want: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"'{key}' is missing or is not {want}"[:300], where=self.where)

    def natural(self, key: str) -> int:
        v = self.value.get(key)
        if type(v) is not int or not 0 <= v < 2**63:
            raise self._wrong(key, "a natural number")
        return v

    def text(self, key: str) -> str:
        v = self.value.get(key)
        if not isinstance(v, str):
            raise self._wrong(key, "text")
        return v

    def number(self, key: str) -> float:
        v = self.value.get(key)
        if not isinstance(v, int | float) or isinstance(v, bool):
            raise self._wrong(key, "a number")
        if not -1e300 < v < 1e300:  # also refuses NaN, and an integer that no float holds
            raise self._wrong(key, "a finite number")
        return float(v)

    def naturals(self, key: str) -> tuple[int, ...]:
        v = self.value.get(key)
        if not isinstance(v, list) or not all(type(n) is int and 0 <= n < 2**63 for n in v):
            raise self._wrong(key, "a list of natural numbers")
        return tuple(v)

    def texts(self, key: str) -> tuple[str, ...]:
        v = self.value.get(key)
        if not isinstance(v, list) or not all(isinstance(n, str) for n in v):
            raise self._wrong(key, "a list of text")
        return tuple(v)

    def items(self, key: str) -> list[Any]:
        v = self.value.get(key)
        if not isinstance(v, list):
            raise self._wrong(key, "a list")
        return v

    def table(self, key: str) -> dict[str, Any]:
        v = self.value.get(key)
        if not isinstance(v, dict):
            raise self._wrong(key, "an object")
        return v

    def text_map(self, key: str) -> dict[str, str]:
        v = self.table(key)
        if not all(isinstance(n, str) for n in v.values()):
            raise self._wrong(key, "a map of text")
        return v

    def fields(self, key: str) -> Fields:
        return Fields(self.value.get(key), f"{self.where}, {key}")
