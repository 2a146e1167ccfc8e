"""A prepared task's requests on disk: requests.jsonl, one Sample a line; requests.idx, the lines' offsets;
requests.hash, the prompt hashes.

Written by `Harness.prepare`, read block by block by the workers, so that the GPU never waits for a tokenizer's
template, a dataset or a few-shot sampler.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ... import atomic
from ..contracts import Answer, Json, Model, PreparedTask, Request, Sample, digest, prompt_hash

_HASH_LINE = 33
"""Bytes of a line of requests.hash: what `digest` gives, and its newline."""


@dataclass(frozen=True)
class Staged:
    """What `write_samples` saw, for PreparedTask."""

    samples: int
    prompt_hash: str
    prompt_chars: float
    requests_per_sample: float
    weights: tuple[float, ...]


def write_samples(folder: Path, samples: Iterable[Sequence[Request] | Sample], *, block: int) -> Staged:
    """Writes the samples (or only their requests) in order and returns what PreparedTask needs.

    The weight of a block is its number of characters to read plus four per token that may be generated.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[bytes] = []
    offsets, hashes, weights = [0], [], [0.0]
    chars = requests = 0
    for i, given in enumerate(samples):
        sample = given if isinstance(given, Sample) else Sample(i, tuple(given), prompt_hash(given))
        if sample.id != i:
            raise ValueError(f"sample ids are positions: expected {i}, got {sample.id}")
        lines.append(encode_sample(sample))
        offsets.append(offsets[-1] + len(lines[-1]))
        hashes.append(sample.prompt_hash)
        if i and i % block == 0:
            weights.append(0.0)
        weights[-1] += _weight(sample)
        chars += sum(len(a) for r in sample.requests for a in r.arguments if isinstance(a, str))
        requests += len(sample.requests)
    atomic.write_bytes(folder / "requests.jsonl", b"".join(lines))
    atomic.write_bytes(folder / "requests.idx", struct.pack(f"<{len(offsets)}Q", *offsets))
    atomic.write_text(folder / "requests.hash", "".join(f"{h}\n" for h in hashes))
    n = max(len(lines), 1)
    return Staged(len(lines), digest(hashes), chars / n, requests / n, tuple(weights) if lines else ())


def apart(prepared: PreparedTask) -> PreparedTask:
    """The task with a block for each sample, where it generates text: asked the fast way, its answers end one by one, and what
    a crash loses is what was being answered. Likelihoods end by the batch, and keep their blocks."""
    weights = []
    generates = False
    for sample in iter_samples(Path(prepared.folder)):
        if any(r.kind == "plain" for r in sample.requests):
            return prepared  # infer.py's own calls, which get the rows of a block together
        generates = generates or any(r.kind == "generate_until" for r in sample.requests)
        weights.append(_weight(sample))
    return replace(prepared, block=1, weights=tuple(weights)) if generates else prepared


def read_block(prepared: PreparedTask, block: int) -> list[Sample]:
    """The samples of one block."""
    return read_samples(Path(prepared.folder), prepared.samples_of(block))


def read_samples(folder: Path, ids: range) -> list[Sample]:
    """Consecutive samples by id; opens and closes the files."""
    if not len(ids):
        return []
    with open(folder / "requests.idx", "rb") as f:
        f.seek(ids.start * 8)
        first, *rest = struct.unpack(f"<{len(ids) + 1}Q", f.read((len(ids) + 1) * 8))
    with open(folder / "requests.jsonl", "rb") as f:
        f.seek(first)
        text = f.read(rest[-1] - first)
    return [decode_sample(line) for line in text.splitlines()]


def read_hashes(folder: Path) -> list[str]:
    """The prompt hash of every sample, in order."""
    return (folder / "requests.hash").read_text().split()


def read_some_hashes(folder: Path, ids: range) -> list[str]:
    """Those of consecutive samples; reads no others where all hashes are as long as ours."""
    with open(folder / "requests.hash", "rb") as f:
        f.seek(ids.start * _HASH_LINE)
        found = f.read(len(ids) * _HASH_LINE).decode("ascii", "replace").splitlines()
        even = os.fstat(f.fileno()).st_size % _HASH_LINE == 0
    if even and len(found) == len(ids) and all(len(h) == _HASH_LINE - 1 for h in found):
        return found
    return read_hashes(folder)[ids.start : ids.stop]


def iter_samples(folder: Path) -> Iterator[Sample]:
    """All samples, in order."""
    with open(folder / "requests.jsonl", "rb") as f:
        for line in f:
            yield decode_sample(line)


def run_requests(model: Model, samples: Sequence[Sample]) -> list[Answer]:
    """Sends all requests of the samples in one call and returns one answer per sample."""
    outputs = model.respond([r for s in samples for r in s.requests])
    answers, at = [], 0
    for s in samples:
        answers.append(Answer(s.id, s.prompt_hash, tuple(outputs[at : at + len(s.requests)])))
        at += len(s.requests)
    return answers


def encode_sample(sample: Sample) -> bytes:
    """One line with its newline."""
    value: dict[str, Json] = {
        "id": sample.id,
        "hash": sample.prompt_hash,
        "requests": [[r.kind, list(r.arguments)] for r in sample.requests],
    }
    if sample.document is not None:
        value["document"] = sample.document
    # ASCII only: a line separator inside a prompt (U+2028, \x85) must not end the line for any reader.
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def decode_sample(line: bytes | str) -> Sample:
    """The inverse of `encode_sample`."""
    v = json.loads(line)
    return Sample(
        v["id"], tuple(Request(k, tuple(a)) for k, a in v["requests"]), v["hash"], v.get("document")
    )


def encode_answer(answer: Answer) -> str:
    """One line without its newline."""
    value: dict[str, Json] = {
        "sample": answer.sample,
        "hash": answer.prompt_hash,
        "outputs": list(answer.outputs),
    }
    if answer.problem:
        value["problem"] = answer.problem
    if answer.partial:
        value["partial"] = answer.partial
    return json.dumps(value, separators=(",", ":"))


def decode_answer(line: bytes | str) -> Answer:
    """The inverse of `encode_answer`. Lists inside outputs stay lists."""
    v = json.loads(line)
    return Answer(v["sample"], v["hash"], tuple(v["outputs"]), v.get("problem", ""), v.get("partial", ""))


def read_answers(path: Path) -> list[Answer]:
    """The answers of a ScoreJob's file."""
    with open(path, "rb") as f:
        return [decode_answer(line) for line in f]


def _weight(sample: Sample) -> float:
    size = sum(len(a) for r in sample.requests for a in r.arguments if isinstance(a, str))
    return size + 4.0 * sum(_output_tokens(r) for r in sample.requests) + 1.0


def _output_tokens(request: Request) -> float:
    if request.kind != "generate_until" or len(request.arguments) < 2:
        return 0.0
    settings = request.arguments[1]
    if not isinstance(settings, dict):
        return 0.0
    return float(
        settings.get("max_gen_toks") or settings.get("max_new_tokens") or settings.get("max_tokens") or 256
    )
