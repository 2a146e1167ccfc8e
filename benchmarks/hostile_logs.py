"""Logs that make a reader slow: a trigger word on each line, one endless line, a thousand files; with or without a root.

Used by `benchmarks/diagnosis_logs.py` and by the tests. Everything follows from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = "[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered"
ROOTS = (
    ROOT,
    "node-12 kernel: [81234.101] NVRM: Xid (PCI:0000:5d:00): 79, pid=4393, GPU has fallen off the bus.",
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB",
    "OSError: [Errno 28] No space left on device",
)
_WORDS_SEED = 7


def _words() -> list[str]:
    rng = random.Random(_WORDS_SEED)
    return [
        "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 9)))
        for _ in range(4000)
    ]


def _stamp(i: int) -> str:
    return f"2026-03-20 {i // 3600 % 24:02d}:{i // 60 % 60:02d}:{i % 60:02d}"


def same(word: str, rng: random.Random) -> Iterator[str]:
    """One sentence with counters."""
    i = 0
    while True:
        i += 1
        yield f"{_stamp(i)} INFO rank{i % 8} worker {word} in exporter, batch {i} of this hour"


def other_text(word: str, rng: random.Random) -> Iterator[str]:
    """A different sentence on each line."""
    vocabulary, i = _words(), 0
    while True:
        i += 1
        yield f"{_stamp(i)} INFO {word} " + " ".join(rng.choices(vocabulary, k=9))


def firing(word: str, rng: random.Random) -> Iterator[str]:
    """A line that rules take for an event, of many ranks, each in other words."""
    vocabulary, i = _words(), 0
    while True:
        i += 1
        yield f"[rank{i % 512}]: {_stamp(i)} WARNING ConnectionError: {word} " + " ".join(
            rng.choices(vocabulary, k=6)
        )


def structured(word: str, rng: random.Random) -> Iterator[str]:
    """One JSON object per line."""
    vocabulary, i = _words(), 0
    while True:
        i += 1
        yield f'{{"ts": "{_stamp(i)}", "level": "info", "rank": {i % 8}, "message": "{word} {" ".join(rng.choices(vocabulary, k=5))} {i}"}}'


def tracebacks(word: str, rng: random.Random) -> Iterator[str]:
    """Tracebacks that are caught and logged, one after the other."""
    i = 0
    while True:
        i += 1
        yield f"{_stamp(i)} INFO {word} push failed, will try again"
        yield "Traceback (most recent call last):"
        yield f'  File "/opt/exporter/push.py", line {i % 90 + 1}, in push'
        yield "    self.session.post(self.url, data=rows)"
        yield f"requests.exceptions.ReadTimeout: gateway-{i % 40} read timed out"


STYLES: dict[str, Callable[[str, random.Random], Iterator[str]]] = {
    "same": same,
    "other text": other_text,
    "firing": firing,
    "json": structured,
    "tracebacks": tracebacks,
}


def flood(path: Path, word: str, style: str, size: int, seed: int = 0, root: str | None = None) -> int | None:
    """Writes a flood of about `size` bytes; with `root`, that line somewhere in it. Returns the root's line number."""
    rng = random.Random(f"{seed}{word}{style}")
    rows, written = [], 0
    for row in STYLES[style](word, rng):
        rows.append(row)
        written += len(row) + 1
        if written >= size:
            break
    at = None
    if root is not None:
        at = rng.randrange(len(rows) + 1)
        if style == "tracebacks":
            at -= at % 5
        rows.insert(at, f'{{"level": "error", "message": "{root}"}}' if style == "json" else root)
    path.write_text("\n".join(rows) + "\n")
    return None if at is None else at + 1


def endless_line(path: Path, size: int, words: list[str], kind: str) -> None:
    """One line of `size` bytes: `plain` text, with trigger `words` in it, or a `bar` that redraws itself."""
    rng = random.Random(1)
    if kind == "bar":
        piece = "".join(
            f"\rtraining: {i % 100:3d}%|#####     | {i}/90000 [00:01<12:00, 4.1it/s]" for i in range(20_000)
        )
    else:
        vocabulary = _words() + (words if kind == "words" else [])
        piece = " ".join(rng.choices(vocabulary, k=200_000)) + " "
    data = piece.encode()
    with path.open("wb") as f:
        for _ in range(max(1, size // len(data))):
            f.write(data)


def many_files(folder: Path, files: int, size: int, words: list[str], seed: int = 0) -> tuple[str, int]:
    """`files` floods of `size` bytes each, of all words, with a root in one of them. Returns its file and line."""
    rng = random.Random(seed)
    chosen, found = rng.randrange(files), ("", 0)
    styles = list(STYLES)
    for i in range(files):
        name = f"rank-{i}.log"
        at = flood(
            folder / name, words[i % len(words)], styles[i % 3], size, seed + i, ROOT if i == chosen else None
        )
        if at is not None:
            found = (name, at)
    return found


FLOOD_LINE = "WARNING: Too many open files seen so far, batch {batch} of rank {rank} loss 2.31 lr 1e-4"


def many_of_one(
    folder: Path, files: int, size: int, root: str | None = None, seed: int = 0
) -> tuple[str, int]:
    """`files` logs of `size` bytes, of which each line fires a rule and shows a loss; with `root`, that line somewhere
    in one of them. Returns its file and line."""
    rng = random.Random(seed)
    chosen, found = rng.randrange(files), ("", 0)
    for i in range(files):
        rows, written, name = [], 0, f"rank-{i}.log"
        while written < size:
            rows.append(FLOOD_LINE.format(batch=len(rows), rank=i))
            written += len(rows[-1]) + 1
        if root is not None and i == chosen:
            at = rng.randrange(len(rows) + 1)
            rows.insert(at, root)
            found = (name, at + 1)
        (folder / name).write_text("\n".join(rows) + "\n")
    return found
