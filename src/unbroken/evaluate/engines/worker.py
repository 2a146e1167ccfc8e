"""A worker: connects to the coordinator, leases and loads the model once, then answers blocks until it is told to stop.

python -m unbroken.evaluate.engines.worker --cluster OUT/cluster.json --name w0 [--gpus 0,1]

It writes no file: answers go to the coordinator, block by block. Between two blocks it does nothing but take the next
one from its queue; the coordinator refills the queue before it is empty. If the coordinator dies, the worker ends
after the block in flight, at most `GRACE_S` later, and the GPU is free.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import (
    EvaluationError,
    ModelChanged,
    ModelDoesNotLoad,
    OutOfMemory,
    RunInterrupted,
    UnbrokenError,
)
from ...link.bounds import Message
from ...private import read_secret
from ..contracts import Answer, Harness, Model, ModelSpec, PreparedTask, Sample
from ..model.cache import Lease, Places, lease
from ..model.sources import FileInfo, Manifest, Source, hash_model, memo_folder, open_source
from ..suite.codec import decode, encode
from ..suite.registry import get_backend, get_harness
from ..suite.staged import decode_sample, encode_answer
from .wire import VERSION, Channel, TooLarge

GRACE_S = 30.0
_FATAL = (
    "CUDA error",
    "device-side assert",
    "CUBLAS_STATUS",
    "cuDNN error",
    "NCCL error",
    "an illegal memory access",
)
"""After one of these a process's device context is lost: every later call fails, so the worker ends and is replaced."""


@dataclass(frozen=True)
class Item:
    """One block of the queue."""

    visit: int
    task: str
    block: int


class Queue:
    """Blocks to answer, shared by the reader thread and the main one."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._stop = ""

    def extend(self, items: Sequence[Item]) -> None:
        """Appends."""
        with self._changed:
            self._items.extend(items)
            self._changed.notify()

    def give_up(self, blocks: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Takes these out, as far as they have not begun, and returns them."""
        wanted = set(blocks)
        with self._changed:
            given = [(i.task, i.block) for i in self._items if (i.task, i.block) in wanted]
            self._items = deque(i for i in self._items if (i.task, i.block) not in wanted)
        return given

    def stop(self, why: str) -> None:
        """No further block is taken."""
        with self._changed:
            self._stop = self._stop or why
            self._changed.notify()

    def take(self) -> Item | None:
        """The next block, as soon as there is one; None when stopped."""
        with self._changed:
            while not self._stop and not self._items:
                self._changed.wait()
            return None if self._stop else self._items.popleft()

    @property
    def why(self) -> str:
        """Why it was stopped."""
        return self._stop


class Worker:
    """One connection, one model."""

    def __init__(self, channel: Channel, name: str, gpus: Sequence[int], *, warm: bool = True) -> None:
        self.channel = channel
        self.name = name
        self.gpus = tuple(gpus)
        self.warm = warm
        """Import what the backend needs beside the fetch; not where that has been done, or may have hung."""
        self.queue = Queue()
        self.tasks: dict[str, PreparedTask] = {}
        self.inline: dict[tuple[str, int], list[str]] = {}
        self.harnesses: dict[str, Harness] = {}
        self.lease: Lease | None = None
        self.source: Source | None = None
        """Where the model is read from if it is no copy of ours: somebody may write there."""
        self.files: tuple[FileInfo, ...] = ()
        self.hashed = ""
        """What they hold."""
        self._now: tuple[str, int, float] | None = None
        self._ended = threading.Event()
        self._halt = threading.Event()
        """The model is not needed any more: ends its fetch."""
        self._answered = 0

    def serve(self, token: str, shared: Path) -> int:
        """Runs to the end; returns an exit code."""
        self.channel.send(
            "hello", version=VERSION, token=token, name=self.name, node=os.uname().nodename, gpus=list(self.gpus),
            pid=os.getpid(), now=time.time(), sees=shared.is_dir(),
        )  # fmt: skip
        welcome = self.channel.receive()
        if welcome is None or welcome["op"] != "welcome":
            why = (
                welcome.get("why")
                if welcome
                else "it hung up; cluster.json may be that of an earlier coordinator"
            )
            print(f"unbroken eval worker: the coordinator did not take {self.name}: {why}", file=sys.stderr)
            return EvaluationError.exit_code
        spec = decode(ModelSpec, welcome["spec"])
        suite = (
            f"suite {welcome['suite']}, " if welcome.get("suite") else ""
        )  # not every coordinator names it
        _log(f"joined as {self.name}: {suite}model {spec.title}, folder {shared}")
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, args=(float(welcome["beat_s"]),), daemon=True).start()
        try:
            model = self._load(spec, welcome)
        except RunInterrupted:
            self._say("bye", why=self.queue.why)
            self._log_end(self.queue.why)
            return 0
        except UnbrokenError as e:
            self._log_end(str(e))
            self._say("unfit", kind=type(e).__name__, what=e.what, where=e.where, todo=e.todo)
            _log(str(e))
            self._release()
            return e.exit_code
        except Exception as e:  # noqa: BLE001  whatever a model library raises is told to the coordinator
            traceback.print_exc()
            self._log_end("the model does not load")
            self._say("unfit", kind="ModelDoesNotLoad", what=f"the model does not load: {type(e).__name__}: {_short(e)}",
                      where=spec.source, todo="See the worker's log; check dtype, backend and the files")  # fmt: skip
            self._release()
            return EvaluationError.exit_code
        try:
            code = self._drain(model)
            self._say("bye", why=self.queue.why)
            self._log_end(self.queue.why or "the device is lost, see above")
            return code
        except ModelChanged as e:
            self._say("unfit", kind=type(e).__name__, what=e.what, where=e.where, todo=e.todo)
            _log(str(e))
            return e.exit_code
        finally:
            self._ended.set()
            model.close()
            self._release()
            self.channel.close()

    def _log_end(self, why: str) -> None:
        n = self._answered
        _log(f"ended after {n} block{'' if n == 1 else 's'} that it answered: {why}")

    def _release(self) -> None:
        if self.lease is not None:
            self.lease.release()

    # ---- threads

    def _read(self) -> None:
        while True:
            message = self.channel.receive()
            if message is None:
                self.queue.stop("the coordinator is gone")
                self._halt.set()
                if not self._ended.wait(GRACE_S):
                    self._log_end(f"{self.queue.why}, and the block in flight took more than {GRACE_S:.0f} s")
                    os._exit(EvaluationError.exit_code)  # a hung call must not keep the GPU
                return
            try:
                self._obey(message)
            except (LookupError, TypeError, ValueError, AttributeError, UnbrokenError) as e:
                # Who does not understand its orders must not wait for others.
                self.queue.stop(
                    f"the coordinator sent a message that makes no sense: {type(e).__name__}: {e}"
                )

    def _obey(self, message: Message) -> None:
        op = message["op"]
        if op == "task":
            prepared = decode(PreparedTask, message["prepared"])
            self.tasks[prepared.task.name] = prepared
        elif op == "work":
            for number, lines in (message.get("lines") or {}).items():
                self.inline[(message["task"], int(number))] = lines
            self.queue.extend([Item(message["visit"], message["task"], b) for b in message["blocks"]])
        elif op == "yield":
            given = self.queue.give_up([(t, b) for t, b in message["blocks"]])
            self._say("yielded", blocks=given)
        elif op == "stop":
            self.queue.stop(message.get("why") or "asked to")
            self._halt.set()

    def _beat(self, every: float) -> None:
        while not self._ended.wait(every):
            now = self._now
            self._say(
                "beat", task=now[0] if now else "", block=now[1] if now else -1, since=now[2] if now else 0.0
            )

    def _say(self, op: str, **fields: Any) -> None:
        try:
            self.channel.send(op, **fields)
        except OSError:
            self.queue.stop("the coordinator is gone")

    # ---- the main thread

    def _load(self, spec: ModelSpec, welcome: Message) -> Model:
        began = time.time()
        backend = get_backend(spec.backend)
        ready = threading.Thread(target=_get_ready, args=(spec.backend, self.gpus), daemon=True)
        if self.warm:
            ready.start()
        folder: Path | None = None
        fetch_s = 0.0
        if backend.needs_weights:
            given = welcome["model"]
            if given["cache"]:
                places = Places(
                    Path(given["memory"]) if given["memory"] else None, tuple(Path(d) for d in given["disks"])
                )
                manifest = decode(Manifest, given["manifest"])
                self.lease = lease(open_source(given["address"]), manifest, places, halt=self._halt)
                folder, fetch_s = self.lease.path, self.lease.fetched_s
            else:
                folder = Path(given["address"])
                self._look_at(open_source(given["address"]), given["files"], given["hash"])
        if ready.ident is not None:
            ready.join()
        model = backend.load(spec, folder, self.gpus)
        self._check_files()
        self._say("ready", fetch_s=fetch_s, load_s=time.time() - began - fetch_s, started=began,
                  cached=bool(self.lease), conditions=encode(model.conditions), uncompiled=_uncompiled())  # fmt: skip
        return model

    def _look_at(self, source: Source, there: Sequence[Sequence[Any]], hashed: str) -> None:
        """Notes the files as they are. Raises ModelChanged if they are not those with this hash."""
        self.source, self.files, self.hashed = source, tuple(source.files()), hashed
        if [[f.name, f.size, f.stamp] for f in self.files] != [list(f) for f in there]:
            # Another node's own copy, or others' files in the place of ours.
            found = hash_model(source, memo_folder(), halt=self._halt)
            if found.hash != hashed:
                raise ModelChanged("the files are not those that the evaluation began with", where=source.address,
                                   todo="Put them back, or evaluate these in another --out")  # fmt: skip
            self._check_files()

    def _check_files(self) -> None:
        """Raises ModelChanged if they were written to since; weights may be mapped, so that this would change answers too.

        Files that are gone are none of ours: what is mapped stays. One that was touched, linked or had its rights changed
        has other times: its content is what counts.
        """
        if self.source is None:
            return
        try:
            now = {f.name: f for f in self.source.files()}
        except ModelDoesNotLoad:
            return
        if all(now.get(f.name, f) == f for f in self.files):
            return
        same = all(f.name in now and now[f.name].size == f.size for f in self.files)
        if not same or hash_model(self.source, memo_folder(), halt=self._halt).hash != self.hashed:
            raise ModelChanged("the model's files were changed while they were evaluated", where=self.source.address,
                               todo="Put them back, or evaluate these in another --out")  # fmt: skip
        self.files = tuple(now.values())

    def _drain(self, model: Model) -> int:
        visit = -1
        while True:
            item = self.queue.take()
            if item is None:
                return 0
            if item.visit != visit:
                model.restore()  # a batch that was halved for one shard is not halved for the next
                visit = item.visit
            started = time.time()
            self._now = (item.task, item.block, started)
            try:
                answers = self._answer(model, item)
                self._check_files()
            except ModelChanged:
                raise
            except Exception as e:  # noqa: BLE001  a harness or model may raise anything; the block is reported, the rest goes on
                traceback.print_exc()
                kind = type(e).__name__
                self._say("failed", task=item.task, block=item.block, visit=item.visit, kind=kind, why=f"{kind}: {_short(e)}",
                          started=started, ended=time.time())  # fmt: skip
                if any(sign in str(e) for sign in _FATAL):
                    return EvaluationError.exit_code
                continue
            finally:
                self._now = None
            try:
                self._say("block", task=item.task, block=item.block, visit=item.visit, started=started, ended=time.time(),
                          answers=[json.loads(encode_answer(a)) for a in answers], conditions=encode(model.conditions))  # fmt: skip
            except TooLarge as e:
                self._say("failed", task=item.task, block=item.block, visit=item.visit, kind="TooLarge",
                          why=f"its answers are {e}; a smaller --block makes them smaller", started=started, ended=time.time())  # fmt: skip
                continue
            self._answered += 1

    def _answer(self, model: Model, item: Item) -> list[Answer]:
        prepared = self.tasks[item.task]
        name = prepared.task.harness
        harness = self.harnesses.get(name)
        if harness is None:
            harness = self.harnesses[name] = get_harness(name)
        lines = self.inline.pop((item.task, item.block), None)
        samples: list[Sample] = (
            harness.build_requests(prepared, item.block)
            if lines is None
            else [decode_sample(x) for x in lines]
        )
        while True:
            try:
                answers = harness.run(model, prepared, samples)
                break
            except OutOfMemory as e:
                if not model.halve():
                    raise OutOfMemory("one sequence alone does not fit on the device", where=f"task {item.task}, block {item.block}",
                                      todo="Lower max_length, or give the task more GPUs") from e  # fmt: skip
        asked = [(s.id, s.prompt_hash) for s in samples]
        if [(a.sample, a.prompt_hash) for a in answers] != asked:
            raise EvaluationError(f"the harness gave {len(answers)} answers to {len(asked)} samples, or to others",
                                  where=f"task {item.task}, block {item.block}")  # fmt: skip
        return answers


def _short(e: BaseException) -> str:
    text = " ".join(str(e).split())
    return text if len(text) <= 600 else text[:600] + " ..."


def connect(cluster: Path | Message, *, within_s: float = 60.0) -> tuple[Channel, Message]:
    """A channel to the coordinator that wrote this file (or gave this), and what the file says.

    Raises EvaluationError after `within_s`.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            where = cluster if isinstance(cluster, dict) else _read_address(cluster)
            sock = socket.create_connection((where["host"], where["port"]), timeout=10)
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return Channel(sock), where
        except (OSError, ValueError) as e:
            if time.monotonic() > deadline:
                raise EvaluationError(f"no coordinator answers: {e}", where=str(cluster),
                                      todo="Start `unbroken eval run` first, and check that its address can be reached from here") from e  # fmt: skip
            time.sleep(0.1)


def _read_address(cluster: Path) -> Message:
    """Raises ValueError for a file that names no coordinator (yet), UnsafeFile for one that others may have written."""
    _address(json.loads(cluster.read_bytes()))
    return _address(json.loads(read_secret(cluster)))


def _address(found: Any) -> Message:
    """What a cluster.json says, once it says all of it. Raises ValueError."""
    kinds = {"host": str, "port": int, "token": str, "shared": str}
    if not isinstance(found, dict) or any(type(found.get(k)) is not kind for k, kind in kinds.items()):
        raise ValueError(f"the file does not say {', '.join(kinds)}")
    if not 0 < found["port"] < 1 << 16:
        raise ValueError(f"the file says port {found['port']}")
    return found


def join(
    cluster: Path | Message, name: str, gpus: Sequence[int], *, within_s: float = 60.0, warm: bool = True
) -> int:
    """Connects and serves; returns an exit code."""
    channel, where = connect(cluster, within_s=within_s)
    return Worker(channel, name, gpus, warm=warm).serve(where["token"], Path(where["shared"]))


def stand_by(backend: str, gpus: Sequence[int]) -> None:
    """Imports what this backend needs, makes the devices ready beside that when told to ("device"), and waits for "go".

    Ends the process if nobody will say it.
    """
    told = os.dup(0)  # whatever is imported may do with the standard input as it likes
    devices = threading.Thread(target=_warm, args=(backend, "warm_devices", gpus), daemon=True)
    go = threading.Event()

    def listen() -> None:
        with os.fdopen(told) as words:
            for word in words:
                if word == "device\n":
                    devices.start()
                elif word == "go\n":
                    go.set()
                    return
        os._exit(0)  # the coordinator is gone, and what is being imported may hang

    threading.Thread(target=listen, daemon=True).start()
    _warm(backend, "warm")
    go.wait()
    if devices.ident is not None:
        devices.join()


def _get_ready(backend: str, gpus: Sequence[int]) -> None:
    _warm(backend, "warm")
    _warm(backend, "warm_devices", gpus)


def _warm(backend: str, what: str, *arguments: object) -> None:
    began = time.monotonic()
    try:
        method = getattr(get_backend(backend), what, None)
        if method is not None:
            method(*arguments)
    except (Exception, SystemExit) as e:  # noqa: BLE001  whatever is missing is said when the model is loaded
        _log(f"{what}: {type(e).__name__}: {_short(e)}")
    _log(f"{what} took {time.monotonic() - began:.1f} s")


def _uncompiled() -> int:
    """Imported modules whose bytecode is kept nowhere, so that every start compiles them.

    0 where `compileall` as it is advised would not help: it writes beside the sources, and for no -O.
    """
    if sys.flags.optimize or sys.pycache_prefix:
        return 0
    specs = [getattr(m, "__spec__", None) for m in list(sys.modules.values())]
    return sum(
        1
        for s in specs
        if s is not None and s.has_location and (s.origin or "").endswith(".py")
        and s.cached and not os.path.exists(s.cached)
    )  # fmt: skip


def _log(words: str) -> None:
    """One write, so that the lines of two threads stay apart."""
    sys.stderr.write(f"unbroken eval worker: {words}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The process that engines start."""
    parser = argparse.ArgumentParser(prog="unbroken.evaluate.engines.worker")
    parser.add_argument("--cluster", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--gpus", default="")
    parser.add_argument(
        "--stand-by",
        metavar="BACKEND",
        help="import what it needs, then wait for a line on the standard input",
    )
    given = parser.parse_args(argv)
    gpus = [int(g) for g in given.gpus.split(",") if g]
    if given.stand_by:
        stand_by(given.stand_by, gpus)
    try:
        return join(given.cluster, given.name, gpus, warm=False)
    except UnbrokenError as e:
        print(f"unbroken eval worker: {e}", file=sys.stderr)
        return e.exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # library threads (CUDA, tokenizers, HTTP) must not hold the GPU
