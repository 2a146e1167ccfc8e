"""Checks and prepares tasks in processes of their own: harnesses are slow to import, and may crash or print.

python -m unbroken.evaluate.preparation.prepare reads one JSON job a line on its standard input and answers each with one line; it
ends when its input does, so it never outlives the coordinator.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import atomic
from ...errors import EvaluationError, UnbrokenError
from ...journal.codec import decode, encode
from ..contracts import Harness, Json, ModelSpec, PreparedTask, Score, Suite, Task, digest
from ..processes.bytecode import keep_bytecode
from ..processes.imports import Forked, Imports, Process, end_piped, start_piped
from ..result.folder import FULL, EvalDir, read_json
from ..suite.registry import HARNESSES, get_harness
from ..suite.staged import apart
from . import reads

Message = dict[str, Any]
_TOKENIZER = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


def fingerprint(
    task: Task, suite: Suite, spec: ModelSpec, model_files: Path | None, own: Path | None = None
) -> str:
    """Changes when the prompts of a task may: then they are built again.

    Over the task, the suite's folder, the block size, the chat template and tokenizer, the harness's version and, for
    tasks that are files, their stamps; what else the preparation read is in `reads`. `own`: the evaluation's folder.
    """
    parts: list[Any] = [
        encode(replace(task, headline="")),
        suite.folder,
        spec.block if spec.exact else [spec.block, "fast"],
        spec.chat_template,
        spec.tokenizer,
        spec.max_length,
    ]
    parts += [spec.backend, _library_version(task.harness)]
    for place in (task.harness_name, *reads.texts(dict(task.options))):
        path = Path(suite.folder or ".") / place
        with contextlib.suppress(OSError):  # no name of a file
            if path.exists():
                parts.append(_stamps(path, own))
    tokenizer = Path(spec.tokenizer) if spec.tokenizer else model_files
    if spec.chat_template and tokenizer is not None:
        for file in sorted({f for g in _TOKENIZER for f in tokenizer.glob(g) if f.is_file()}):
            parts.append([file.name, digest(file.read_text(errors="replace"))])
    return digest(parts)


def read_prepared(
    folder: EvalDir, task: Task, mark: str, seen: dict[str, reads.Stamp] | None = None
) -> PreparedTask | None:
    """The task as an earlier command prepared it, if nothing that matters has changed. `seen`: stamps looked at already."""
    path = folder.prepared(task.name)
    if not path.exists():
        return None
    try:
        value = read_json(path)
        found = decode(PreparedTask, value["prepared"], where=str(path))
    except (UnbrokenError, KeyError):
        return None  # damaged: it is prepared again
    stamps = value.get("reads")
    same = value.get("fingerprint") == mark and found.folder == str(folder.task(task.name).absolute())
    return found if same and isinstance(stamps, dict) and reads.unchanged(stamps, seen) else None


def remember(folder: EvalDir, prepared: PreparedTask, mark: str, stamps: Mapping[str, reads.Stamp]) -> None:
    """Makes `read_prepared` find it. `stamps`: of what was read for it."""
    atomic.write_json(
        folder.prepared(prepared.task.name),
        {"fingerprint": mark, "prepared": encode(prepared), "reads": dict(stamps)},
    )


class Preparers:
    """A few preparing processes, each used by one thread at a time."""

    def __init__(self, count: int, log: Path, imports: Imports | None = None) -> None:
        """`imports`: a fork server that has the harnesses, which may outlive these."""
        self._threads = concurrent.futures.ThreadPoolExecutor(max(1, count), "prepare")
        self._local = threading.local()
        self._imports = imports
        self._all: list[Process] = []
        self._lock = threading.Lock()
        self._closed = False
        self._log = log

    async def ask(self, op: str, suite: Suite, **fields: Any) -> Any:
        """The answer to one job. Raises what the harness raised, or EvaluationError if the process died."""
        job = {"op": op, "suite": encode(suite), **fields}
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, job)

    def _ask(self, job: Message) -> Any:
        process: Process | None = getattr(self._local, "process", None)
        if process is None or process.poll() is not None:
            process = self._local.process = self._start()
        line = _answer_of(process, job)
        if not line and isinstance(process, Forked) and not process.pid:
            process = self._local.process = self._start()  # the fork server died before it was there
            line = _answer_of(process, job)
        if not line.endswith(b"\n"):
            what = job.get("task", {}).get("name", job["op"])
            raise EvaluationError(f"the process that prepares '{what}' died", where=str(self._log),
                                  hint="See its log: out of memory, or a crash in the harness")  # fmt: skip
        answer = json.loads(line)
        if "error" in answer:
            raise revive(answer["error"])
        return answer["value"]

    def _start(self) -> Process:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, open(self._log, "ab") as log:
            if self._closed:
                raise EvaluationError("the evaluation is ending")
            process = start_piped(
                self._imports, ["unbroken.evaluate.preparation.prepare"], child_env(), log.fileno()
            )
            self._all.append(process)
        return process

    def close(self) -> None:
        """Ends the processes; jobs that wait are dropped."""
        with self._lock:
            self._closed = True
            for p in self._all:
                p.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for p in self._all:
            end_piped(p)


def _answer_of(process: Process, job: Message) -> bytes:
    """What the process answers to a job; empty if it died."""
    assert process.stdin is not None and process.stdout is not None  # both are pipes
    try:
        process.stdin.write((json.dumps(job) + "\n").encode())
        process.stdin.flush()
        return process.stdout.readline()
    except (OSError, ValueError):
        return b""


def child_env(**more: str) -> dict[str, str]:
    """The environment of our child processes: finds this package; no GPU, unless `more` says otherwise."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        **keep_bytecode(),
        **more,
    }


def revive(error: Message) -> UnbrokenError:
    """An error of another process as one of ours, of the same kind where we have it."""
    import unbroken.errors as tree

    kind = getattr(tree, error["kind"], EvaluationError)
    found: UnbrokenError = EvaluationError(error["what"], where=error.get("where"), hint=error.get("todo"))
    if isinstance(kind, type) and issubclass(kind, UnbrokenError):
        made = kind.__new__(kind)
        UnbrokenError.__init__(made, error["what"], where=error.get("where"), hint=error.get("todo"))
        found = made
    return found


def answer(job: Message) -> Any:
    """Does one job."""
    suite = decode(Suite, job["suite"])
    op = job["op"]
    if op == "list":
        return list(get_harness(job["harness"]).list_tasks(suite))
    if op == "combine":
        tasks = [decode(PreparedTask, p) for p in job["prepared"]]
        harness = get_harness(tasks[0].task.harness)
        found = harness.combine(job["group"], tasks, [decode(Score, s) for s in job["scores"]])
        return None if found is None else encode(found)
    task = decode(Task, job["task"])
    harness = get_harness(task.harness)
    if op == "expand":
        return [encode(t) for t in harness.expand(task, suite)]
    if op == "check":
        check = getattr(harness, "check", None)
        if check is None:
            return False
        check(task, suite)
        return True
    if op == "prepare":
        files = Path(job["model_files"]) if job["model_files"] else None
        return _prepare(harness, task, suite, decode(ModelSpec, job["spec"]), files, Path(job["folder"]))
    raise EvaluationError(f"unknown job '{op}'")


def disk_full(error: BaseException) -> EvaluationError | None:
    """What is to be said where a full or read-only disk is behind an error, however it was wrapped; else None."""
    link: BaseException | None = error
    for _ in range(20):
        if isinstance(link, OSError) and link.errno in FULL:
            where = str(
                link.filename or link.filename2 or "the evaluation's folder or the cache of data sets"
            )
            return EvaluationError(f"the prompts cannot be written: {link.strerror or link}", where=where,
                                   hint="Make room there, then run the same command")  # fmt: skip
        link = (link.__cause__ or link.__context__) if link is not None else None
    return None


def _prepare(
    harness: Harness, task: Task, suite: Suite, spec: ModelSpec, files: Path | None, folder: Path
) -> Json:
    """The prepared task, and the stamps of what was read for it."""
    # The tokenizer's files are in the fingerprint by what they hold: each checkpoint of a run brings its own.
    own = [str(folder), *([str(files)] if files is not None else [])]
    with (
        tempfile.TemporaryDirectory(prefix="unbroken-reads-") as aside,
        reads.recording([*own, aside], Path(aside) / "children", str(folder.parents[1])) as recorder,
    ):
        prepared = harness.prepare(task, suite, spec, files, folder)
        stamps = recorder.reads()
    if not spec.exact:
        prepared = apart(prepared)
    return {"prepared": encode(replace(prepared, inputs=reads.content(stamps))), "reads": stamps}


def main(argv: Sequence[str] = ()) -> int:
    """Answers jobs until the input ends. What libraries print goes to the log."""
    found = [str(reads.CHILDREN), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, found))  # for what a task may start
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = {"value": answer(json.loads(line))}
        except UnbrokenError as e:
            reply = e.as_json()
        except Exception as e:  # noqa: BLE001  a harness may raise anything; it is told to the coordinator
            if (full := disk_full(e)) is not None:
                out.write(json.dumps(full.as_json()) + "\n")
                out.flush()
                continue
            traceback.print_exc()
            text = " ".join(str(e).split())[:600]
            reply = {"error": {"kind": "EvaluationError", "what": f"the harness failed: {type(e).__name__}: {text}",
                               "where": str(json.loads(line).get("task", {}).get("name", "")), "todo": "See logs/prepare.log"}}  # fmt: skip
        out.write(json.dumps(reply) + "\n")
        out.flush()
    return 0


def _library_version(harness: str) -> str:
    package = HARNESSES.get(harness, harness).partition(":")[0].partition(".")[0]
    found = []
    for name in (package, "lm_eval" if harness == "lm_eval" else ""):
        try:
            found.append(importlib.metadata.version(name) if name else "")
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return "/".join(found)


def _stamps(path: Path, own: Path | None) -> list[Any]:
    """Of a file, or of all files below a folder but those of the evaluation itself."""
    if not path.is_dir():
        return [[str(path), reads.stamp(str(path))]]
    skip = own.resolve() if own is not None else None
    found = []
    for at, folders, files in os.walk(path):
        folders[:] = sorted(
            f for f in folders if f != "__pycache__" and not (skip and (Path(at) / f).resolve() == skip)
        )
        found += [[os.path.join(at, f), reads.stamp(os.path.join(at, f))] for f in sorted(files)]
    return found


if __name__ == "__main__":
    sys.exit(main())
