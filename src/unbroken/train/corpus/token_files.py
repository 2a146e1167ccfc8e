"""Token files that other tools wrote, read in place: Megatron's .bin with .idx, datatrove's .ds with .ds.index and .ds.loss."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np

from ... import atomic
from ...errors import InputError
from .tokens import Tokens, default_cache

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "uint8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_PIECE = 1 << 24


def is_token_file(source: str) -> bool:
    """Whether a source is named as such a file."""
    return source.endswith((".bin", ".idx", ".ds"))


def open_token_file(source: str, vocab: int, cache: Path | None = None) -> Tokens:
    """The tokens of a file, in its own type, with their fingerprint (reckoned once, then kept in the cache).

    Raises InputError for files that do not belong together, and where a token is not in the vocabulary.
    """
    path = Path(source).expanduser()
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    dtype, count = _datatrove(path) if path.suffix == ".ds" else _megatron(path)
    size = np.dtype(dtype).itemsize
    if path.stat().st_size != count * size:
        raise InputError(
            f"the index tells of {count} tokens of {size} bytes, the file has {path.stat().st_size} bytes",
            where=str(path),
            hint="Copy both files again: one of them is cut short or of another data set",
        )
    fingerprint, largest = _fingerprint(path, dtype, cache)
    if largest >= vocab:
        raise InputError(
            f"token {largest} is not in a vocabulary of {vocab}: another tokenizer wrote it",
            where=str(path),
            hint=f"--vocab {largest + 1} or more, as its tokenizer has",
        )
    mask = _mask(path, count)
    if mask is not None:
        of_mask, _ = _fingerprint(mask, "uint8", cache)
        fingerprint = hashlib.sha256(f"{fingerprint} {of_mask}".encode()).hexdigest()
    return Tokens(path, count, fingerprint, source, dtype, 0, mask)


def _mask(path: Path, count: int) -> Path | None:
    """datatrove's loss mask beside its tokens: a byte for each. Raises InputError for one of other tokens."""
    mask = path.with_name(path.name + ".loss")
    if path.suffix != ".ds" or not mask.exists():
        return None
    if mask.stat().st_size != count:
        raise InputError(
            f"the loss mask has {mask.stat().st_size} bytes for {count} tokens",
            where=str(mask),
            hint="Copy both files again, or move the mask away to learn every token",
        )
    return mask


def _megatron(path: Path) -> tuple[str, int]:
    head = _read(path.with_suffix(".idx"), 34)
    if head[:9] != _MEGATRON_MAGIC or len(head) < 34:
        raise InputError("it is no index of Megatron's", where=str(path.with_suffix(".idx")))
    version, code, sequences, _ = struct.unpack("<QBQQ", head[9:34])
    if version != 1 or code not in _MEGATRON_TYPES:
        raise InputError(
            f"an index of version {version} with type {code} is not known",
            where=str(path.with_suffix(".idx")),
            hint=f"Version 1, and types {', '.join(map(str, _MEGATRON_TYPES))}",
        )
    try:
        lengths = np.fromfile(path.with_suffix(".idx"), np.int32, sequences, offset=34)
    except (OSError, ValueError, MemoryError) as e:
        raise InputError(f"the index cannot be read: {e}", where=str(path.with_suffix(".idx"))) from e
    if len(lengths) != sequences:
        raise InputError("the index is cut short", where=str(path.with_suffix(".idx")))
    return _MEGATRON_TYPES[code], int(lengths.sum(dtype=np.int64))


def _datatrove(path: Path) -> tuple[str, int]:
    index = path.with_name(path.name + ".index")
    ends = np.frombuffer(_read(index), np.uint64)
    if not len(ends):
        raise InputError("the index tells of no document", where=str(index))
    count, size = int(ends[-1]), path.stat().st_size
    for dtype in ("uint16", "uint32"):
        if size == count * np.dtype(dtype).itemsize:
            return dtype, count
    return "uint16", count  # the comparison of sizes says what is wrong


def _read(path: Path, count: int = -1) -> bytes:
    try:
        with open(path, "rb") as f:
            return f.read(count)
    except OSError as e:
        raise InputError(f"the index beside the tokens cannot be read: {e.strerror}", where=str(path)) from e


def _fingerprint(path: Path, dtype: str, cache: Path | None) -> tuple[str, int]:
    """SHA-256 of the tokens and the largest of them."""
    s = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\0{s.st_size}\0{s.st_mtime_ns}\0{dtype}".encode()).hexdigest()[:24]
    kept = (cache or default_cache()) / f"fingerprint-{key}.txt"
    try:
        digest, largest = kept.read_text().split()
        return digest, int(largest)
    except (OSError, ValueError):
        pass  # not reckoned yet
    h, most = hashlib.sha256(), 0
    with open(path, "rb") as f:
        while piece := f.read(_PIECE):
            h.update(piece)
            most = max(most, int(np.frombuffer(piece, dtype).max()))
    kept.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(kept, f"{h.hexdigest()} {most}\n", durable=False)
    return h.hexdigest(), most
