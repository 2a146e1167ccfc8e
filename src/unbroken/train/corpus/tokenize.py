"""`unbroken train tokenize`: a folder of text or a Hugging Face dataset as one token file, in parallel, going on where it stopped.

Each file (or range of a dataset's rows) becomes a part of its own, whole or not at all; parts that are there, of the same input
and tokenizer, are not made again. At the end they are put together in their order, without the documents that came before
(`--deduplicate`, by a hash of their text), as `tokens.ds` with `tokens.ds.index` (datatrove's layout) and `tokens.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ... import atomic
from ...errors import InputError, MissingExtra, UsageError
from .tokens import find_corpus

ROWS = 20_000
"""Rows of a dataset in a part."""
_HASH = 16


@dataclass(frozen=True)
class TokenizeInput:
    """What one part is made of."""

    source: str
    """A file, or a dataset's name or folder."""
    key: str
    """Changes with the input."""
    rows: tuple[int, int] | None = None
    """Of a dataset."""
    split: str = "train"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="`unbroken train tokenize --help` lists the options")


def main(argv: Sequence[str]) -> int:
    """Makes the token file; 0. Raises InputError for text that cannot be read, MissingExtra, UsageError."""
    p = _Parser(
        prog="unbroken train tokenize", usage="%(prog)s SOURCE --out FOLDER [OPTIONS]", allow_abbrev=False
    )
    p.description = __doc__
    p.add_argument(
        "source", help="folder or file of text (.jsonl: a document a line), or dataset:NAME_OR_FOLDER"
    )
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the token file goes")
    p.add_argument(
        "--tokenizer", default="bytes", metavar="FOLDER", help="of Hugging Face, or bytes [default: bytes]"
    )
    p.add_argument(
        "--field", default="text", metavar="NAME", help="text of a row or JSON line [default: text]"
    )
    p.add_argument("--split", default="train", metavar="NAME", help="of a dataset [default: train]")
    p.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="processes [default: cores, at most 8]")  # fmt: skip
    p.add_argument("--deduplicate", action="store_true", help="leave out documents whose text came before")
    args = p.parse_args(list(argv))
    if args.workers < 1:
        raise UsageError(f"--workers {args.workers} is not above 0")
    inputs = find_inputs(args.source, args.split)
    said = tokenize(inputs, args.out, args.tokenizer, args.field, args.workers, args.deduplicate, _progress)
    print(f"{said['tokens']:,} tokens of {said['documents']:,} documents ({said['duplicates']:,} left out), vocabulary {said['vocab']}, "
          f"sha256 {said['sha256'][:12]}\ntrain on it: --data {args.out}/tokens.ds --vocab {said['vocab']}")  # fmt: skip
    return 0


def find_inputs(source: str, split: str) -> list[TokenizeInput]:
    """The parts, in their order. Raises InputError where there is nothing to read."""
    if source.startswith("dataset:"):
        name = source.removeprefix("dataset:")
        rows = _dataset(name, split)
        key = str(getattr(rows, "_fingerprint", "")) or name
        return [
            TokenizeInput(name, key, (a, min(a + ROWS, len(rows))), split) for a in range(0, len(rows), ROWS)
        ]
    corpus = find_corpus(source)
    return [TokenizeInput(str(corpus.root / n), f"{size} {changed}") for n, size, changed in corpus.files]


def tokenize(
    inputs: Sequence[TokenizeInput], out: Path, tokenizer: str, field: str, workers: int, deduplicate: bool,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:  # fmt: skip
    """Makes what of the parts is not there yet, and the token file of them all; returns what `tokens.json` says."""
    parts = out / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    jobs = [(i, parts / f"{_name(i, tokenizer, field)}") for i in inputs]
    todo = [
        (i, path) for path, i in {p: i for i, p in jobs}.items() if not path.with_suffix(".json").exists()
    ]
    done = len(jobs) - len(todo)
    progress(done, len(jobs))
    if todo:
        # Spawned: a tokenizer's own threads do not survive a fork.
        with ProcessPoolExecutor(min(workers, len(todo)), get_context("spawn")) as pool:
            waiting = [pool.submit(make_part, i, path, tokenizer, field) for i, path in todo]
            try:
                for f in as_completed(waiting):
                    f.result()
                    done += 1
                    progress(done, len(jobs))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return _join([path for _, path in jobs], out, tokenizer, deduplicate)


def _name(i: TokenizeInput, tokenizer: str, field: str) -> str:
    said = json.dumps([asdict(i), tokenizer, _tokenizer_hash(tokenizer), field])
    return hashlib.sha256(said.encode(errors="surrogateescape")).hexdigest()[:24]


def make_part(i: TokenizeInput, path: Path, tokenizer: str, field: str) -> None:
    """One part: tokens, where each document ends, a hash of each; whole when its .json is there."""
    encode, vocab = open_tokenizer(tokenizer)
    dtype = np.uint16 if vocab <= 1 << 16 else np.uint32
    ends: list[int] = []
    hashes, count = bytearray(), 0
    aside = path.with_suffix(f".{os.getpid()}.aside")
    try:
        with open(aside, "wb") as f:
            for text in documents(i, field):
                ids = encode(text)
                f.write(np.asarray(ids, dtype).tobytes())
                count += len(ids)
                ends.append(count)
                hashes += hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=_HASH).digest()
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path.with_suffix(".tokens"))
    finally:
        aside.unlink(missing_ok=True)
    atomic.write_bytes(path.with_suffix(".index"), np.asarray(ends, np.uint64).tobytes() + bytes(hashes))
    atomic.write_text(
        path.with_suffix(".json"), json.dumps({"documents": len(ends), "tokens": count, "vocab": vocab})
    )


def documents(i: TokenizeInput, field: str) -> Iterator[str]:
    """The texts of a part. Raises InputError, with file and line, for what is no text."""
    if i.rows is not None:
        rows = _dataset(i.source, i.split)
        for n in range(*i.rows):
            yield _text(rows[n], field, f"{i.source}, row {n}")
        return
    path = Path(i.source)
    try:
        if path.suffix == ".jsonl":
            with open(path, encoding="utf-8") as f:
                for number, line in enumerate(f, 1):
                    if line.strip():
                        try:
                            row = json.loads(line)
                        except ValueError as e:
                            raise InputError(f"it is no JSON: {e}", where=f"{path}, line {number}") from e
                        yield _text(row, field, f"{path}, line {number}")
        else:
            yield path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as e:
        raise InputError(f"a file of the text cannot be read: {e.strerror}", where=str(path)) from e
    except UnicodeDecodeError as e:
        raise InputError("it is not UTF-8", where=str(path)) from e


def _text(row: Any, field: str, where: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        names = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise InputError(
            f"it has no text named '{field}'", where=where, hint=f"--field, one of: {names}"[:300]
        )
    return text


def open_tokenizer(name: str) -> tuple[Callable[[str], Sequence[int]], int]:
    """(text -> its tokens with the one that ends it, size of the vocabulary)."""
    if name == "bytes":
        return lambda text: [*text.encode("utf-8", "surrogateescape"), 0], 256
    tokenizer = load_tokenizer(name)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"] + end, len(tokenizer)


def load_tokenizer(name: str) -> Any:
    """A tokenizer of Hugging Face. Raises InputError where there is none, MissingExtra."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtra("transformers", "eval", what="a tokenizer of Hugging Face") from None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as e:
        raise InputError(f"there is no tokenizer: {str(e)[:200]}", where=f"--tokenizer {name}") from e


def _tokenizer_hash(name: str) -> str:
    """Changes with a tokenizer's files."""
    h = hashlib.sha256()
    for file in sorted(Path(name).glob("*.json")) if name != "bytes" and Path(name).is_dir() else ():
        h.update(file.name.encode() + file.read_bytes())
    return h.hexdigest()[:16]


def _dataset(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "eval", what="a dataset of Hugging Face") from None
    try:
        found = (
            datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name, split=split)
        )
        return found[split] if isinstance(found, datasets.DatasetDict) else found
    except (OSError, ValueError, KeyError) as e:
        raise InputError(f"the dataset cannot be read: {str(e)[:200]}", where=f"{name}, split {split}") from e


def _join(parts: Sequence[Path], out: Path, tokenizer: str, deduplicate: bool) -> dict[str, Any]:
    said = [json.loads(p.with_suffix(".json").read_text()) for p in parts]
    vocab = max(s["vocab"] for s in said)
    dtype = np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)
    seen: set[bytes] = set()
    ends, count, left_out, digest = [], 0, 0, hashlib.sha256()
    target = out / "tokens.ds"
    aside = out / f".tokens.ds.{os.getpid()}.aside"
    try:
        with open(aside, "wb") as f:
            for path, s in zip(parts, said, strict=True):
                tokens = np.fromfile(path.with_suffix(".tokens"), dtype)
                index = path.with_suffix(".index").read_bytes()
                stops = np.frombuffer(index, np.uint64, s["documents"])
                start = 0
                for n, stop in enumerate(stops.tolist()):
                    mark = index[8 * s["documents"] + _HASH * n :][:_HASH]
                    if deduplicate and mark in seen:
                        left_out += 1
                    else:
                        piece = tokens[start:stop].tobytes()
                        f.write(piece)
                        digest.update(piece)
                        count += stop - start
                        ends.append(count)
                        if deduplicate:
                            seen.add(mark)
                    start = stop
            f.flush()
            os.fsync(f.fileno())
        # Its index first: a token file without one is refused, one with another's too.
        atomic.write_bytes(target.with_name("tokens.ds.index"), np.asarray(ends, np.uint64).tobytes())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    found = {"schema": 1, "tokens": count, "documents": len(ends), "duplicates": left_out, "vocab": vocab,
             "tokenizer": tokenizer, "tokenizer_files": _tokenizer_hash(tokenizer), "sha256": digest.hexdigest()}  # fmt: skip
    atomic.write_text(out / "tokens.json", json.dumps(found, indent=1) + "\n")
    return found


def _progress(done: int, of: int) -> None:
    print(f"\r{done} of {of} parts", end="" if done < of else "\n", file=sys.stderr, flush=True)
