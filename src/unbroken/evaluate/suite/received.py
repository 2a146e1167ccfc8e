"""What a worker sent, once it is known to make sense: each message as a dataclass, or `Malformed`.

A worker that shows the token is believed to mean well, not to be right: it may run another version, a broken
harness, or on a machine whose memory flips bits. So nothing that it sends reaches the plan or the disk before its
shape is checked, and a block only if it was given to that worker. Stored lines are read with the same eyes (answers.py).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import EvaluationError, UnbrokenError
from ...journal.codec import decode
from ...link.bounds import Malformed, Message, number, same_secret, text, whole
from ..contracts import Conditions, Json, PreparedTask, Request
from .staged import read_samples, read_some_hashes

WORDS = 4000
"""Characters of a reason; what is longer is cut."""
DEPTH = 16
"""So deep may an output be nested."""
_LONG_S = 1e9
_LATEST = 1e11
"""Seconds since 1970."""


class BadAnswers(Malformed):
    """A block that was given to this worker, whose answers are none. It counts against the block, as a crash does."""


Held = Collection[tuple[str, int]]
"""The blocks that a worker has been given and has not answered."""


@dataclass(frozen=True)
class WorkerHello:
    """The first message."""

    name: str
    node: str
    gpus: tuple[int, ...]
    pid: int
    now: float
    sees: bool


@dataclass(frozen=True)
class BlockAnswers:
    """A block's answers."""

    task: str
    number: int
    assignment: int
    started: float
    ended: float
    answers: tuple[Json, ...]
    """As answers.py stores them."""
    conditions: Conditions
    tokens: tuple[int, int] = (0, 0)
    """Read and generated; 0 where the worker does not count."""
    problems: tuple[str, ...] = ()
    """Of the samples without an answer."""


def admits(m: Message | None, token: str) -> bool:
    """Whether this first message shows the token."""
    return m is not None and m["op"] == "hello" and same_secret(m.get("token"), token)


def hello(m: Message) -> WorkerHello:
    """Who speaks. Raises Malformed."""
    gpus = m.get("gpus")
    if not isinstance(gpus, list) or len(gpus) > 64:
        raise Malformed("'gpus' is no list of at most 64 numbers")
    return WorkerHello(
        text(m.get("name"), "name", empty=False), text(m.get("node"), "node"),
        tuple(whole(g, "gpus", 0, 1 << 16) for g in gpus), whole(m.get("pid"), "pid", 0, 1 << 32),
        number(m.get("now"), "now", 0.0, _LATEST), bool(m.get("sees")),
    )  # fmt: skip


def words(value: Any) -> str:
    """A reason as it may be shown: cut, and without characters that move a terminal's cursor."""
    said = value if isinstance(value, str) else str(type(value).__name__)
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in said[:WORDS])


def energy(m: Message) -> float | None:
    """Joules that the worker's GPUs have taken; None where it does not know. Raises Malformed."""
    return None if m.get("energy_j") is None else number(m["energy_j"], "energy_j", 0.0, 1e15)


def ready(m: Message) -> tuple[float, float, int, int]:
    """(seconds of the fetch, of the load, modules without bytecode, samples at once). Raises Malformed."""
    # A clock that was set back while the model was loaded makes these negative; that is no reason to lose a worker.
    fetch_s, load_s = (number(m.get(k), k, -_LONG_S, _LONG_S) for k in ("fetch_s", "load_s"))
    uncompiled, at_once = (
        whole(m.get("uncompiled", 0), "uncompiled", 0, 1 << 32),
        whole(m.get("at_once", 1), "at_once", 1, 1 << 20),
    )
    return max(fetch_s, 0.0), max(load_s, 0.0), uncompiled, at_once


def failed(m: Message, held: Held) -> tuple[str, int, str]:
    """(task, block, why). Raises Malformed, also for a block that this worker does not hold."""
    return *_held(m.get("task"), m.get("block"), held), words(m.get("why"))


def yielded(m: Message, held: Held) -> list[tuple[str, int]]:
    """The blocks given up. Raises Malformed, also for one that this worker does not hold."""
    given = m.get("blocks")
    if not isinstance(given, list) or not all(isinstance(b, list) and len(b) == 2 for b in given):
        raise Malformed("'blocks' is no list of pairs")
    found = [_held(t, b, held) for t, b in given]
    if len(set(found)) != len(found):
        raise Malformed("a block is given up twice")
    return found


def beat(m: Message) -> tuple[tuple[str, int], int]:
    """The block that is being answered, ("", -1) between two; and what grows while several are. Raises Malformed."""
    at = text(m.get("task"), "task"), whole(m.get("block"), "block", -1, 1 << 48)
    return at, whole(m.get("steps", 0), "steps", 0, 1 << 62)


def unfit(m: Message) -> Message:
    """The words of an error. Raises Malformed."""
    said = {"kind": text(m.get("kind"), "kind"), "what": words(m.get("what"))}
    return {**said, **{k: None if m.get(k) is None else words(m[k]) for k in ("where", "todo")}}


def block(m: Message, held: Held, prepared: Mapping[str, PreparedTask]) -> BlockAnswers:
    """A block that was given to this worker, with one answer to each of its samples, in order.

    Raises Malformed, BadAnswers where it is one of its blocks; EvaluationError if the task's own files cannot be read.
    """
    task, n = _held(m.get("task"), m.get("block"), held)
    try:
        return _block(m, task, n, prepared[task])
    except Malformed as e:
        raise BadAnswers(f"block {n} of {task}: {e}") from None


def _block(m: Message, task: str, n: int, p: PreparedTask) -> BlockAnswers:
    started = number(m.get("started"), "started", 0.0, _LATEST)
    ended = max(started, number(m.get("ended"), "ended", 0.0, _LATEST))
    try:
        conditions = decode(Conditions, m.get("conditions"), where="conditions")
    except UnbrokenError as e:
        raise Malformed(str(e)) from None
    for value in (conditions.engine, conditions.device, conditions.dtype, conditions.padding):
        text(value, "conditions")
    ids = p.samples_of(n)
    found = answers(m.get("answers"), ids, *asked(p, ids))
    problems = tuple(a["problem"] for a in found if "problem" in a)
    return BlockAnswers(
        task,
        n,
        whole(m.get("visit"), "visit", 0, 1 << 48),
        started,
        ended,
        tuple(found),
        conditions,
        _tokens(m.get("tokens")),
        problems,
    )


def _tokens(given: Any) -> tuple[int, int]:
    if given is None:
        return 0, 0
    if not isinstance(given, list) or len(given) != 2:
        raise Malformed("'tokens' is no pair")
    return whole(given[0], "tokens", 0, 1 << 48), whole(given[1], "tokens", 0, 1 << 48)


def asked(prepared: PreparedTask, ids: range) -> tuple[list[str], list[Sequence[Request]]]:
    """(prompt hash, requests) of these samples. Raises EvaluationError if the task's files cannot be read."""
    folder = Path(prepared.folder)
    try:
        return read_some_hashes(folder, ids), [s.requests for s in read_samples(folder, ids)]
    except (OSError, ValueError, LookupError, struct.error) as e:
        raise EvaluationError(f"the prompts of '{prepared.task.name}' cannot be read: {e}", where=str(folder),
                              hint="Remove that folder, then run the same command") from e  # fmt: skip


def answers(
    given: Any, ids: range, hashes: Sequence[str], requests: Sequence[Sequence[Request]]
) -> list[Json]:
    """The answers as they are stored, without what else came with them.

    Raises Malformed if they are not those of these samples, each once and in order, with one output for each request.
    """
    if not isinstance(given, list) or len(given) != len(ids):
        raise Malformed(f"'answers' is no list of {len(ids)}")
    found: list[Json] = []
    for i, (a, sample, hashed) in enumerate(zip(given, ids, hashes, strict=True)):
        if not isinstance(a, dict) or type(a.get("sample")) is not int or a["sample"] != sample:
            raise Malformed(f"there is no answer to sample {sample} in its place")
        if a.get("hash") != hashed:
            raise Malformed(f"sample {sample} was answered for another prompt")
        outputs, problem = a.get("outputs"), a.get("problem", "")
        if not isinstance(outputs, list) or not isinstance(problem, str):
            raise Malformed(f"the answer to sample {sample} has no outputs")
        if problem:
            found.append({"sample": sample, "hash": hashed, "outputs": [], "problem": words(problem)})
            continue
        _check_outputs(outputs, requests[i], sample)
        cut = {"partial": words(a["partial"])} if a.get("partial") else {}
        found.append({"sample": sample, "hash": hashed, "outputs": outputs, **cut})
    return found


def _check_outputs(outputs: list[Json], requests: Sequence[Request], sample: int) -> None:
    if len(outputs) != len(requests):
        raise Malformed(f"sample {sample} has {len(outputs)} outputs for {len(requests)} requests")
    for i, output in enumerate(outputs):
        kind = requests[i].kind
        if kind in ("loglikelihood", "multiple_choice"):
            right = isinstance(output, list) and len(output) == 2 and _is_number(output[0])
        elif kind == "loglikelihood_rolling":
            right = _is_number(output) or (
                isinstance(output, list) and len(output) == 1 and _is_number(output[0])
            )
        elif kind == "generate_until":
            right = isinstance(output, str)
        else:
            right = isinstance(output, str) or _is_flat(output)
        if not right:
            raise Malformed(f"output {i} of sample {sample} is no answer to a '{kind}' request")


def _is_number(value: Json) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 53)


def _is_flat(value: Json) -> bool:
    """Whether it is nested less than DEPTH deep: what json can just read, it may not be able to write again."""
    level = [value]
    for _ in range(DEPTH):
        level = [
            inner
            for v in level
            if isinstance(v, list | dict)
            for inner in (v.values() if isinstance(v, dict) else v)
        ]
        if not level:
            return True
    return False


def _held(task: Any, number: Any, held: Held) -> tuple[str, int]:
    if not isinstance(task, str) or type(number) is not int or (task, number) not in held:
        raise Malformed(f"block {number!r:.40} of {task!r:.80} is not one that this worker was given")
    return task, number
