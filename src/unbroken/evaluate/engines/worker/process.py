"""A worker: connects to the coordinator, loads the model once, then answers blocks until it is asked to stop.

python -m unbroken.evaluate.engines.worker.process --cluster OUT/cluster.json --name w0 [--gpus 0,1]

It writes no file: answers go to the coordinator, block by block. Between two blocks it does nothing but take the next
one from its queue; the coordinator refills the queue before it is empty. If the coordinator dies, the worker ends
after the block in flight, at most `GRACE_S` later, and the GPU is free.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ....errors import EvaluationError, ModelChanged, RunInterrupted, UnbrokenError
from ....journal.codec import decode, encode
from ....link.bounds import Message
from ...contracts import Answer, FedModel, ModelSpec, PreparedTask
from ...suite.staged import encode_answer
from ..wire import VERSION, TooLarge, WorkerChannel
from .answering import Answering
from .block_queue import Item, Queue
from .connecting import connect
from .energy import EnergyCounter
from .feeding_model import Feeding, conditions_of
from .loading import LoadedModel, load
from .warming import count_uncompiled, log, short, stand_by

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


class Worker:
    """One connection, one model."""

    def __init__(self, channel: WorkerChannel, name: str, gpus: Sequence[int], *, warm: bool = True) -> None:
        """`warm`: import what the backend needs beside the fetch; not where that has been done, or may have hung."""
        self.channel = channel
        self.name = name
        self.gpus = tuple(gpus)
        self.warm = warm
        self.queue = Queue()
        self.answering = Answering()
        self._now: tuple[str, int, float] | None = None
        self._ended = threading.Event()
        self._halt = threading.Event()
        """The model is not needed any more: ends its fetch."""
        self._answered = 0
        self._energy = EnergyCounter(())
        self._steps: Callable[[], int] = lambda: 0

    def serve(self, token: str, shared: Path) -> int:
        """Runs to the end; returns an exit code."""
        self.channel.send(
            "hello", version=VERSION, token=token, name=self.name, node=os.uname().nodename, gpus=list(self.gpus),
            pid=os.getpid(), now=time.time(), sees=shared.is_dir(),
        )  # fmt: skip
        welcome = self.channel.receive()
        if welcome is None or welcome["op"] != "welcome":
            hung_up = "it hung up; cluster.json may be that of an earlier coordinator"
            why = welcome.get("why") if welcome else hung_up
            print(f"unbroken eval worker: the coordinator did not take {self.name}: {why}", file=sys.stderr)
            return EvaluationError.exit_code
        self._energy = EnergyCounter(self.gpus)
        spec = decode(ModelSpec, welcome["spec"])
        suite = (
            f"suite {welcome['suite']}, " if welcome.get("suite") else ""
        )  # not every coordinator names it
        log(f"joined as {self.name}: {suite}model {spec.title}, folder {shared}")
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, args=(float(welcome["beat_s"]),), daemon=True).start()
        try:
            with ExitStack() as held:
                return self._load_and_answer(spec, welcome, held)
        finally:
            self._ended.set()
            self.channel.close()

    def _load_and_answer(self, spec: ModelSpec, welcome: Message, held: ExitStack) -> int:
        try:
            loaded = load(spec, welcome.get("model") or {}, self.gpus, held, self._halt, warm=self.warm)
        except RunInterrupted:
            self._send("bye", why=self.queue.why)
            self._log_end(self.queue.why)
            return 0
        except UnbrokenError as e:
            self._log_end(str(e))
            return self._unfit(e)
        except Exception as e:  # noqa: BLE001  whatever a model library raises is reported to the coordinator
            traceback.print_exc()
            self._log_end("the model does not load")
            self._send("unfit", kind="ModelDoesNotLoad", what=f"the model does not load: {type(e).__name__}: {short(e)}",
                       where=spec.source, todo="See the worker's log; check dtype, backend and the files")  # fmt: skip
            return EvaluationError.exit_code
        held.callback(loaded.model.close)
        self._send("ready", fetch_s=loaded.fetch_s, load_s=loaded.load_s, cached=loaded.cached,
                   conditions=encode(loaded.conditions), uncompiled=count_uncompiled(),
                   at_once=getattr(loaded.model, "at_once", 1))  # fmt: skip
        try:
            code = self._answer_all(loaded)
        except ModelChanged as e:
            return self._unfit(e)
        self._send("bye", why=self.queue.why, energy_j=self._energy.joules)
        self._log_end(self.queue.why or "the device is lost, see above")
        return code

    def _unfit(self, e: UnbrokenError) -> int:
        self._send("unfit", kind=type(e).__name__, what=e.message, where=e.where, todo=e.hint)
        log(str(e))
        return e.exit_code

    def _log_end(self, why: str) -> None:
        n = self._answered
        log(f"ended after {n} block{'' if n == 1 else 's'} that it answered: {why}")

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
            self.answering.add(decode(PreparedTask, message["prepared"]))
        elif op == "work":
            for number, lines in (message.get("lines") or {}).items():
                self.answering.add_lines(message["task"], int(number), lines)
            blocks = message["blocks"]
            crowds = message.get("crowd") or [0] * len(blocks)
            self.queue.extend(
                [
                    Item(message["visit"], message["task"], b, int(c))
                    for b, c in zip(blocks, crowds, strict=True)
                ]
            )
        elif op == "yield":
            given = self.queue.give_up([(t, b) for t, b in message["blocks"]])
            self._send("yielded", blocks=given)
        elif op == "stop":
            self.queue.stop(message.get("why") or "asked to")
            self._halt.set()

    def _beat(self, every: float) -> None:
        while not self._ended.wait(every):
            task, block, since = self._now or ("", -1, 0.0)
            self._send("beat", task=task, block=block, since=since, steps=self._steps())

    def _send(self, op: str, **fields: Any) -> None:
        try:
            self.channel.send(op, **fields)
        except OSError:
            self.queue.stop("the coordinator is gone")

    # ---- the main thread

    def _answer_all(self, loaded: LoadedModel) -> int:
        """Answers what is in the queue until it is stopped; an exit code. Raises ModelChanged."""
        if isinstance(loaded.model, FedModel):
            return self._feed_all(loaded, loaded.model)
        number = -1
        while (item := self.queue.take()) is not None:
            if item.assignment != number:
                loaded.model.restore()  # a batch that was halved for one shard is not halved for the next
                number = item.assignment
            if not self._answer(loaded, item):
                return EvaluationError.exit_code
        return 0

    def _feed_all(self, loaded: LoadedModel, model: FedModel) -> int:
        """The same for a model that answers many blocks at once."""
        fed = Feeding(model, self.answering)
        self._steps = lambda: fed.finished + model.steps
        while (step := fed.step(self.queue)) is not None:
            self._now = fed.oldest
            if step.alone is not None:
                if not self._answer(loaded, step.alone):
                    return EvaluationError.exit_code
                fed.restart_clock()
                continue
            if step.ended:
                loaded.check_files()
            for e in step.ended:
                if isinstance(e.answers, Exception):
                    why = f"{type(e.answers).__name__}: {short(e.answers)}"
                    log(f"task {e.item.task}, block {e.item.block}: {why}")
                    self._failed(e.item, e.started, type(e.answers).__name__, why)
                    if any(sign in str(e.answers) for sign in _FATAL):
                        return EvaluationError.exit_code
                else:
                    self._send_block(e.item, e.answers, e.started, e.ended, loaded, e.tokens)
        return 0

    def _answer(self, loaded: LoadedModel, item: Item) -> bool:
        """Answers one block, or reports why not; False where the device is lost. Raises ModelChanged."""
        started = time.time()
        self._now = (item.task, item.block, started)
        try:
            answers = self.answering.answer(loaded.model, item)
            loaded.check_files()
        except ModelChanged:
            raise
        except Exception as e:  # noqa: BLE001  a harness or model may raise anything; the block is reported, the rest goes on
            traceback.print_exc()
            self._failed(item, started, type(e).__name__, f"{type(e).__name__}: {short(e)}")
            return not any(sign in str(e) for sign in _FATAL)
        finally:
            self._now = None
        self._send_block(item, answers, started, time.time(), loaded, (0, 0))
        return True

    def _send_block(
        self, item: Item, answers: Sequence[Answer], started: float, ended: float, loaded: LoadedModel, tokens: tuple[int, int]
    ) -> None:  # fmt: skip
        conditions = conditions_of(loaded.model, exact=self.answering.is_exact(item))
        try:
            self._send("block", task=item.task, block=item.block, visit=item.assignment, started=started, ended=ended,
                       answers=[json.loads(encode_answer(a)) for a in answers], conditions=encode(conditions), tokens=tokens)  # fmt: skip
        except TooLarge as e:
            self._failed(
                item, started, "TooLarge", f"its answers are {e}; a smaller --block makes them smaller"
            )
            return
        self._answered += 1

    def _failed(self, item: Item, started: float, kind: str, why: str) -> None:
        self._send("failed", task=item.task, block=item.block, visit=item.assignment, kind=kind, why=why, started=started,
                   ended=time.time())  # fmt: skip


def join(
    cluster: Path | Message, name: str, gpus: Sequence[int], *, within_s: float = 60.0, warm: bool = True
) -> int:
    """Connects and serves; returns an exit code."""
    channel, where = connect(cluster, within_s=within_s)
    return Worker(channel, name, gpus, warm=warm).serve(where["token"], Path(where["shared"]))


def main(argv: Sequence[str] | None = None) -> int:
    """The process that engines start."""
    parser = argparse.ArgumentParser(prog="unbroken.evaluate.engines.worker.process")
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
