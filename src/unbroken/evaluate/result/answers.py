"""What a model said, block by block, on disk: the memory that makes the same command go on.

answers/KEY/TASK/0001.jsonl: one checksummed line per block (journal/lines.py), appended by the coordinator that counted itself 0001. KEY is
the model's (weights, dtype, engine: ModelSpec.key); within it an answer is reused only if its sample's prompt hash is
the one of the prompt that would be sent now, and what else it depends on (`PreparedTask.asks`) matches. Nothing in it depends on the number of
workers. Readers take the first whole line of each block: a block that was answered twice counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import atomic
from ...errors import EvaluationError, UnbrokenError
from ...journal import lines
from ...journal.codec import decode
from ...link.bounds import Malformed, whole
from ..contracts import Answer, Conditions, Json, PreparedTask, digest
from ..suite import received
from ..suite.staged import encode_answer, read_hashes


@dataclass(frozen=True)
class AnswerPlace:
    """Where a block's line lies."""

    path: Path
    offset: int
    length: int
    conditions: Conditions
    problems: int = 0


class AnswerStore:
    """The answers under one model key; `incarnation` names the files that this process appends to."""

    def __init__(self, folder: Path, incarnation: int) -> None:
        self.folder = folder
        self.incarnation = incarnation
        self._places: dict[str, dict[int, AnswerPlace]] = {}
        self._files: dict[str, lines.Appender] = {}
        self._dirty: set[lines.Appender] = set()
        self._passed_over: dict[str, list[tuple[str, str]]] = {}

    def scan(self, prepared: PreparedTask) -> set[int]:
        """Blocks that need not be asked again: whole, without problems, with the prompts that would be sent now."""
        task = prepared.task.name
        hashes = read_hashes(Path(prepared.folder))
        found = self._places.setdefault(task, {})
        bad = self._passed_over[task] = []
        for path in sorted(self._folder(task).glob("*.jsonl")):
            for line in lines.read(path):
                try:
                    usable = _usable(line.record, prepared, hashes)
                except Malformed as e:
                    bad.append((f"{path}, byte {line.offset}", str(e)))
                    continue
                if usable is not None and usable[0] not in found:
                    found[usable[0]] = AnswerPlace(path, line.offset, line.length, usable[1])
        return set(found)

    def passed_over(self, task: str) -> list[tuple[str, str]]:
        """(where, why) of the lines that the last scan could make no sense of."""
        return self._passed_over.get(task, [])

    def append(
        self,
        prepared: PreparedTask,
        block: int,
        conditions: Conditions,
        answers: Sequence[Json],
        *,
        keep: bool = True,
    ) -> None:
        """Writes a block's answers (as `staged.encode_answer` makes them, decoded); `keep`: they count.

        The write has reached the kernel when this returns: it survives kill -9. `sync` makes it survive the node.
        Raises OSError as the system gives it (a full disk).
        """
        task = prepared.task.name
        file = self._file(task)
        offset, length = file.append({
            "block": block, "version": _asked(prepared), "conditions": _plain(conditions), "answers": list(answers),
        })  # fmt: skip
        self._dirty.add(file)
        if keep and block not in self._places.setdefault(task, {}):
            bad = sum(1 for a in answers if a.get("problem"))
            self._places[task][block] = AnswerPlace(file.path, offset, length, conditions, bad)

    def merge(
        self, prepared: PreparedTask, given_up: Mapping[int, str], target: Path
    ) -> tuple[Conditions, ...]:
        """Writes the task's exact set: every sample id once, in order, with the prompt hash that was asked.

        Blocks that were given up become answers with a problem. Raises EvaluationError if an id is missing or doubled.
        """
        task = prepared.task.name
        hashes = read_hashes(Path(prepared.folder))
        places = self._places.get(task, {})
        conditions: dict[Conditions, None] = {}
        exact: list[str] = []
        said: list[Json]
        ids: list[int] = []
        for number in range(prepared.blocks):
            place = places.get(number)
            if place is None:
                if number not in given_up:
                    raise EvaluationError(f"block {number} of task '{task}' has no answers", where=str(self.folder),
                                          hint="Run the same command; if it says so again, report it")  # fmt: skip
                said = [
                    {"sample": i, "hash": hashes[i], "outputs": [], "problem": given_up[number]}
                    for i in prepared.samples_of(number)
                ]
            else:
                conditions[place.conditions] = None
                said = self._read(place)
            for a in said:
                ids.append(a["sample"])
                exact.append(
                    encode_answer(
                        Answer(
                            a["sample"],
                            a["hash"],
                            tuple(a["outputs"]),
                            a.get("problem", ""),
                            a.get("partial", ""),
                        )
                    )
                )
                if a["hash"] != hashes[a["sample"]]:
                    raise EvaluationError(
                        f"sample {a['sample']} of task '{task}' was asked another prompt",
                        where=str(self.folder),
                    )
        if ids != list(range(prepared.samples)):
            raise EvaluationError(f"task '{task}' has {len(ids)} answers to {prepared.samples} samples", where=str(self.folder),
                                  hint="Run the same command; if it says so again, report it")  # fmt: skip
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(target, "".join(line + "\n" for line in exact))
        return tuple(conditions)

    def sync(self) -> None:
        """Makes what was appended durable."""
        dirty, self._dirty = self._dirty, set()
        for file in dirty:
            file.sync()

    def close(self) -> None:
        """Syncs and closes."""
        self.sync()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _folder(self, task: str) -> Path:
        return self.folder / task

    def _file(self, task: str) -> lines.Appender:
        if task not in self._files:
            folder = self._folder(task)
            folder.mkdir(parents=True, exist_ok=True)
            self._files[task] = lines.Appender(folder / f"{self.incarnation:04d}.jsonl")
        return self._files[task]

    def _read(self, place: AnswerPlace) -> list[Json]:
        record = lines.record_at(place.path, place.offset, place.length)
        if record is None:
            raise EvaluationError("answers were changed on disk while the evaluation ran", where=str(place.path),
                                  hint="Run the same command: what does not check is asked again")  # fmt: skip
        return list(record["answers"])


def _usable(
    line: Mapping[str, Any] | None, prepared: PreparedTask, hashes: Sequence[str]
) -> tuple[int, Conditions] | None:
    """(block, conditions) of a line; None where it answers other prompts, or not all of them. Raises Malformed."""
    if line is None:
        raise Malformed("the line is torn or damaged")
    block = whole(line.get("block"), "block", 0, 1 << 48)
    if line.get("version") not in _accepted(prepared) or block >= prepared.blocks:
        return None
    ids, said = prepared.samples_of(block), line.get("answers")
    if not isinstance(said, list) or not all(isinstance(a, dict) for a in said):
        raise Malformed("'answers' is no list of objects")
    if [(a.get("sample"), a.get("hash")) for a in said] != list(
        zip(ids, hashes[ids.start : ids.stop], strict=True)
    ):
        return None
    if any("problem" in a for a in received.answers(said, ids, *received.asked(prepared, ids))):
        return None
    try:
        return block, decode(Conditions, line.get("conditions"))
    except UnbrokenError as e:
        raise Malformed(str(e)) from None


def _asked(prepared: PreparedTask) -> str:
    return digest(prepared.asks or prepared.version)


def _accepted(prepared: PreparedTask) -> list[str]:
    """Of a line: answers of earlier releases carry the version."""
    older = [digest(prepared.version)] if prepared.asks in ("", "requests") else []
    return [_asked(prepared), *older]


def _plain(c: Conditions) -> Json:
    return {
        "engine": c.engine,
        "device": c.device,
        "dtype": c.dtype,
        "batch_size": c.batch_size,
        "padding": c.padding,
        **({"batch_tokens": c.batch_tokens} if c.batch_tokens else {}),
    }
