"""The arena: one valid `.safetensors` file per rank, laid out so that it is one sequential, aligned write.

    0                 8                         data_start (multiple of 4 KiB)         file_bytes
    | length, u64 LE | JSON, padded with spaces | tensors, larger items first, no gaps |

Sorted by item size (descending) every tensor is aligned to its items without a gap; sorted by name within a size
the layout is a pure function of names, types and shapes. No torch here. Everything that is read is hostile until
it has been checked. Format: https://huggingface.co/docs/safetensors (header at most 100 MB).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...errors import CheckpointCorrupt, UnsaveableState
from .dtypes import ITEM_BYTES, carrier, is_carried

ALIGN = 4096
MAX_HEADER_BYTES = 100_000_000
RESERVE = 512  # bytes of the header kept for metadata that changes from save to save (step, attempt, rank)
_METADATA = "__metadata__"
_ALIASES = "unbroken.aliases"
_DTYPES = "unbroken.dtypes"
_TOO_LARGE = 2**63


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to store: `dtype` is safetensors' name, `torch_dtype` only where it travels in a carrier."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    torch_dtype: str = ""

    @property
    def bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def spec(name: str, torch_dtype: str, shape: Iterable[int]) -> TensorSpec:
    """The TensorSpec of a tensor of this torch type ("float32" or "torch.float32") and shape.

    Raises UnsaveableState for a type that cannot be stored exactly.
    """
    how = carrier(torch_dtype, key=name)
    true = torch_dtype.removeprefix("torch.") if is_carried(torch_dtype) else ""
    return TensorSpec(name, how.dtype, how.stored_shape(tuple(map(int, shape))), true)


@dataclass(frozen=True)
class TensorSlot:
    """Where a tensor lies: bytes [start, stop) of the data, which begins at `Layout.data_start` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The place of every tensor of one rank's file. Build it with `plan` or `parse_header`."""

    slots: tuple[TensorSlot, ...]
    data_start: int
    aliases: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, TensorSlot]:
        """Slot of each stored name; an alias gives the slot of the name that it stands for."""
        found = {s.name: s for s in self.slots}
        return found | {alias: found[name] for alias, name in self.aliases.items()}

    @property
    def data_bytes(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    @property
    def file_bytes(self) -> int:
        """The exact length of the file."""
        return self.data_start + self.data_bytes

    def span(self, name: str) -> tuple[int, int]:
        """The bytes [start, stop) of the *file* that hold this tensor. Raises KeyError for an unknown name."""
        slot = self.by_name[name]
        return self.data_start + slot.start, self.data_start + slot.stop

    def header(self, metadata: Mapping[str, str] | None = None) -> bytes:
        """The first `data_start` bytes of the file, with more `metadata` (its JSON within `RESERVE` bytes)."""
        body = _header_json(self.slots, {**self.metadata, **(metadata or {})})
        room = self.data_start - 8
        if len(body) > room:
            raise ValueError(
                f"the metadata does not fit: {len(body)} of {room} bytes; keep it below {RESERVE}"
            )
        return struct.pack("<Q", room) + body.ljust(room, b" ")


def plan(specs: Iterable[TensorSpec], aliases: Mapping[str, str] | None = None) -> Layout:
    """The layout of these tensors; `aliases` {other name: name in specs} are recorded and take no bytes.

    Raises UnsaveableState for a name, type, shape or alias that cannot stand in a file.
    """
    ordered = sorted(specs, key=lambda s: (-_item_bytes(s), s.name))
    slots, at, seen = [], 0, set()
    for s in ordered:
        if s.name in seen:
            raise UnsaveableState(s.name, "two tensors have this name")
        if any(n < 0 for n in s.shape):
            raise UnsaveableState(s.name, f"its shape {s.shape} is negative")
        _check_name(s.name)
        seen.add(s.name)
        slots.append(TensorSlot(s.name, s.dtype, s.shape, at, at + s.bytes))
        at += s.bytes
    aliases = dict(sorted((aliases or {}).items()))
    for alias, name in aliases.items():
        _check_name(alias)
        if alias in seen:
            raise UnsaveableState(alias, "it is both a tensor and an alias of another")
        if name not in seen:
            raise UnsaveableState(alias, f"it is an alias of '{name}', which is not stored")
    metadata = {"format": "pt"}
    if aliases:
        metadata[_ALIASES] = json.dumps(aliases, ensure_ascii=False, separators=(",", ":"))
    if carried := {s.name: s.torch_dtype for s in ordered if s.torch_dtype}:
        metadata[_DTYPES] = json.dumps(carried, ensure_ascii=False, separators=(",", ":"))
    needed = 8 + len(_header_json(slots, metadata)) + RESERVE
    data_start = -(-needed // ALIGN) * ALIGN
    if data_start - 8 > MAX_HEADER_BYTES:
        raise UnsaveableState(
            ordered[0].name,
            f"{len(slots)} tensors need a header of {data_start} bytes, above safetensors' {MAX_HEADER_BYTES}",
            hint="Shorten the names or join small tensors",
        )
    return Layout(tuple(slots), data_start, aliases, metadata)


def header_length(first8: bytes, file_bytes: int, *, where: str) -> int:
    """How many bytes of the file the header takes, itself included, from the first eight.

    Raises CheckpointCorrupt if that cannot be, before anything of that size is read.
    """
    if len(first8) < 8 or file_bytes < 8:
        raise CheckpointCorrupt("the file is too short for a safetensors header", where=where)
    (n,) = struct.unpack("<Q", first8[:8])
    if n > MAX_HEADER_BYTES:
        raise CheckpointCorrupt(f"the header claims {n} bytes, more than any valid file has", where=where)
    if 8 + n > file_bytes:
        raise CheckpointCorrupt(f"the header claims {n} bytes of a file of {file_bytes}", where=where)
    return 8 + int(n)


def parse_header(head: bytes, file_bytes: int, *, where: str) -> Layout:
    """The layout of any valid safetensors file from its header (`header_length` bytes) and its length.

    Raises CheckpointCorrupt for whatever safetensors itself refuses: torn or malformed JSON, doubled names,
    unknown types, sizes that disagree, gaps, overlaps, bytes that belong to no tensor.
    """
    data_start = header_length(head, file_bytes, where=where)
    if len(head) < data_start:
        raise CheckpointCorrupt("the header is cut short", where=where)
    table = _load_json(head[8:data_start], where)
    metadata = _text_map(table.pop(_METADATA, {}), "metadata", where)
    slots = sorted((_slot(n, v, where) for n, v in table.items()), key=lambda s: (s.start, s.stop))
    at = 0
    for s in slots:
        if s.start != at:
            kind = "overlaps the tensor before it" if s.start < at else "leaves a gap before it"
            raise CheckpointCorrupt(f"tensor '{s.name}' {kind}", where=where)
        at = s.stop
    if data_start + at != file_bytes:
        raise CheckpointCorrupt(
            f"the header describes {data_start + at} bytes, the file has {file_bytes}", where=where
        )
    aliases: dict[str, str] = {}
    if _ALIASES in metadata:
        aliases = _text_map(_load_json(metadata[_ALIASES].encode(), where), "aliases", where)
        if wrong := [a for a, n in aliases.items() if n not in table or a in table]:
            raise CheckpointCorrupt(f"alias '{wrong[0]}' does not fit the tensors", where=where)
    return Layout(tuple(slots), data_start, aliases, metadata)


def _header_json(slots: Iterable[TensorSlot], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {_METADATA: dict(metadata)}
    for s in slots:
        table[s.name] = {"dtype": s.dtype, "shape": s.shape, "data_offsets": (s.start, s.stop)}
    return json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()


def _item_bytes(s: TensorSpec) -> int:
    if s.dtype not in ITEM_BYTES:
        raise UnsaveableState(s.name, f"there is no element type '{s.dtype}'")
    return ITEM_BYTES[s.dtype]


def _check_name(name: str) -> None:
    if name == _METADATA:
        raise UnsaveableState(name, "safetensors reserves this name")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsaveableState(ascii(name), "its name is not valid Unicode") from None


def _no_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice")
    return table


def _load_json(text: bytes, where: str) -> dict[str, object]:
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as e:
        raise CheckpointCorrupt(f"the header is not valid JSON: {e}"[:300], where=where) from None
    if not isinstance(value, dict):
        raise CheckpointCorrupt("the header is not a JSON object", where=where)
    return value


def _text_map(value: object, what: str, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise CheckpointCorrupt(f"the header's {what} is not a map of text", where=where)
    return value


def _slot(name: str, value: object, where: str) -> TensorSlot:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointCorrupt("the header holds a name that is not valid Unicode", where=where) from None
    entry = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (
        entry.get("dtype"),
        _naturals(entry.get("shape")),
        _naturals(entry.get("data_offsets")),
    )
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise CheckpointCorrupt(f"the header's entry of tensor '{name}' is malformed"[:300], where=where)
    if dtype not in ITEM_BYTES:
        raise CheckpointCorrupt(f"tensor '{name}' has the unknown type '{dtype}'"[:300], where=where)
    start, stop = offsets
    if math.prod(shape) * ITEM_BYTES[dtype] != stop - start:
        raise CheckpointCorrupt(f"tensor '{name}' has a shape that disagrees with its bytes", where=where)
    return TensorSlot(name, dtype, shape, start, stop)


def _naturals(value: object) -> tuple[int, ...] | None:
    """The list as natural numbers, or None if it is anything else."""
    if not isinstance(value, list) or len(value) > 64:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < _TOO_LARGE for n in value) else None
