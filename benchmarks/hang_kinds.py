"""Twenty ways to hang and twenty that only look like it: each a few lines around one loop that all ranks make together.

    unbroken run --nproc 4 -- benchmarks/hang_kinds.py NAME

Run by `benchmarks/hangs.py`. A step is an all-reduce (gloo) and 0.1 s; what is made on purpose comes at step 5 of the first
attempt, and later attempts end at once.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import unbroken

AT, LAST = 5, 12
FOREVER = 10_000
VFORK = 0x100 | 0x4000 | signal.SIGCHLD
"""CLONE_VM, CLONE_VFORK: the parent waits in the kernel, uninterruptibly, for its child."""


@dataclass(frozen=True)
class HangKind:
    """`odd` are the ranks that hold the others up, `doing` what the supervisor should say of them."""

    train: Callable[[Loop], None]
    odd: tuple[int, ...] = ()
    doing: str = ""


HANGS: dict[str, HangKind] = {}
HEALTHY: dict[str, HangKind] = {}


def hang(*odd: int, doing: str) -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
    """The function is a script that hangs."""

    def add(train: Callable[[Loop], None]) -> Callable[[Loop], None]:
        HANGS[train.__name__] = HangKind(train, odd, doing)
        return train

    return add


def healthy(train: Callable[[Loop], None]) -> Callable[[Loop], None]:
    """The function is a script that is only slow."""
    HEALTHY[train.__name__] = HangKind(train)
    return train


class Loop:
    """The training that they have in common."""

    def __init__(self) -> None:
        self.run = unbroken.attach()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", timeout=timedelta(hours=1))
        self.value = torch.ones(8)
        self.scratch = Path(os.environ["UNBROKEN_RUN_DIR"])

    def steps(self, last: int = LAST) -> Iterator[int]:
        for step in range(1, last + 1):
            time.sleep(0.1)
            yield step
            self.reduce()
            self.run.step(step, loss=1.0)

    def reduce(self) -> None:
        dist.all_reduce(self.value)

    def is_time(self, step: int, *ranks: int) -> bool:
        """Whether this rank is to do what is made on purpose now; when that began is written down."""
        if step != AT or (ranks and self.rank not in ranks):
            return False
        path = self.scratch / f"began-{self.rank}"
        if not path.exists():
            path.write_text(str(time.time()))
        return True


# --- twenty that hang


@hang(2, doing="is stopped")
def stopped_by_a_signal(t: Loop) -> None:
    for step in t.steps():
        if t.is_time(step, 2):
            os.kill(os.getpid(), signal.SIGSTOP)


@hang(1, doing="is stuck in the kernel")
def stuck_in_the_kernel(t: Loop) -> None:
    libc = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(1 << 16)
    top = ctypes.c_void_p((ctypes.addressof(stack) + (1 << 16)) & ~15)
    for step in t.steps():
        if t.is_time(step, 1):
            libc.clone(ctypes.cast(libc.sleep, ctypes.c_void_p), top, VFORK, ctypes.c_void_p(FOREVER))


@hang(3, doing="sleeps and holds the interpreter's lock")
def lock_held_in_c(t: Loop) -> None:
    for step in t.steps():
        if t.is_time(step, 3):
            ctypes.PyDLL(None).sleep(FOREVER)


@hang(1, doing="runs its own code")
def endless_loop(t: Loop) -> None:
    for step in t.steps():
        while t.is_time(step, 1):
            pass


@hang(2, doing="waits for a lock of its own")
def deadlock(t: Loop) -> None:
    lock = threading.Lock()
    for step in t.steps():
        if t.is_time(step, 2):
            threading.Thread(target=lambda: (lock.acquire(), threading.Event().wait()), daemon=True).start()
            time.sleep(0.2)
            threading.Condition(lock).wait() if lock.acquire(False) else threading.Event().wait()


class Samples(Dataset[int]):
    """Its 5th sample does something."""

    def __init__(self, what: Callable[[], None] | None) -> None:
        self.what = what

    def __len__(self) -> int:
        return LAST

    def __getitem__(self, i: int) -> int:
        if i == AT and self.what is not None:
            self.what()
        return i


def load(t: Loop, rank: int, what: Callable[[], None]) -> None:
    loader = DataLoader(Samples(what if t.rank == rank else None), num_workers=1, prefetch_factor=1)
    for step, _ in zip(t.steps(), loader, strict=False):
        t.is_time(step, rank)


@hang(3, doing="waits for its data loader")
def loader_worker_stuck(t: Loop) -> None:
    load(t, 3, lambda: time.sleep(FOREVER))


@hang(0, doing="waits for its data loader")
def loader_worker_stopped(t: Loop) -> None:
    load(t, 0, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def feed(queue: multiprocessing.Queue[int]) -> None:
    for i in range(1, AT):
        queue.put(i)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


@hang(1, doing="waits for its data loader")
def loader_worker_dead(t: Loop) -> None:
    queue: multiprocessing.Queue[int] = multiprocessing.Queue()
    multiprocessing.Process(target=feed, args=(queue,), daemon=True).start()
    for step in t.steps():
        t.is_time(step, 1)
        if t.rank == 1:
            queue.get()


@hang(0, doing="waits for its data loader")
def storage_does_not_answer(t: Loop) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    for step in t.steps():
        if t.is_time(step, 0):
            load_batch(server)


def load_batch(server: socket.socket) -> bytes:
    return socket.create_connection(server.getsockname()).recv(1)


@hang(0, doing="saves a checkpoint")
def checkpoint_to_a_dead_storage(t: Loop) -> None:
    pipe = t.scratch / "pipe"
    for step in t.steps():
        if t.is_time(step, 0):
            os.mkfifo(pipe)
            with t.run.phase("checkpointing"):
                torch.save(t.value, pipe)


def save_aside(pipe: Path) -> None:
    time.sleep(FOREVER)


@hang(2, doing="saves a checkpoint")
def checkpoint_process_stuck(t: Loop) -> None:
    for step in t.steps():
        if t.is_time(step, 2):
            child = multiprocessing.Process(target=save_aside, args=(t.scratch,), daemon=True)
            child.start()
            with t.run.phase("checkpointing"):
                child.join()


@hang(0, doing="evaluates")
def evaluation_that_never_ends(t: Loop) -> None:
    for step in t.steps():
        if t.is_time(step, 0):
            with t.run.phase("evaluating"):
                while step:
                    time.sleep(0.01)


@hang(3, doing="evaluates")
def evaluation_waits_for_a_program(t: Loop) -> None:
    for step in t.steps():
        if t.is_time(step, 3):
            evaluate()


def evaluate() -> None:
    subprocess.run(["sleep", str(FOREVER)], check=True)


@hang(2, doing="waits in a collective")
def one_collective_more(t: Loop) -> None:
    for step in t.steps():
        if t.is_time(step, 2):
            dist.barrier()


@hang(1, doing="waits in a collective")
def one_collective_less(t: Loop) -> None:
    for step in t.steps():
        if step != AT or not t.is_time(step, 1):
            dist.broadcast(t.value, 0)


@hang(3, doing="waits in a collective")
def uneven_batches(t: Loop) -> None:
    for step in t.steps(AT if t.rank == 3 else LAST):
        t.is_time(step, 3)
    dist.barrier()


@hang(3, doing="has finished")
def uneven_batches_and_gone(t: Loop) -> None:
    for step in t.steps(AT if t.rank == 3 else LAST):
        t.is_time(step, 3)
    if t.rank == 3:
        os._exit(0)


@hang(1, doing="waits in a collective")
def receives_what_nobody_sends(t: Loop) -> None:
    for step in t.steps():
        if t.is_time(step, 1):
            dist.recv(t.value, 2)


@hang(1, 3, doing="runs its own code")
def two_of_four(t: Loop) -> None:
    for step in t.steps():
        if t.is_time(step, 1, 3):
            time.sleep(FOREVER)


@hang(3, doing="runs its own code")
def in_a_group_of_groups(t: Loop) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for step in t.steps():
        if t.is_time(step, 3):
            time.sleep(FOREVER)
        dist.all_reduce(t.value, group=rows[t.rank // 2])
        dist.all_reduce(t.value, group=columns[t.rank % 2])


# --- twenty that are only slow; SLOW is below the deadline of a step, LONG above it

SLOW, LONG = 9.0, 18.0


def slow_step(*ranks: int, what: Callable[[], None] = lambda: time.sleep(SLOW)) -> Callable[[Loop], None]:
    def train(t: Loop) -> None:
        for step in t.steps():
            if t.is_time(step, *ranks):
                what()

    return train


def burn(seconds: float = SLOW) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def stop_and_go_on() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {SLOW}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


for _name, _train in {
    "one_slow_rank": slow_step(1),
    "all_slow": slow_step(),
    "two_slow": slow_step(0, 3),
    "busy_rank": slow_step(2, what=burn),
    "lock_held_for_a_while": slow_step(1, what=lambda: ctypes.PyDLL(None).sleep(int(SLOW))),
    "stopped_for_a_while": slow_step(2, what=stop_and_go_on),
    "waits_for_a_program": slow_step(3, what=lambda: subprocess.run(["sleep", str(SLOW)], check=True)),
    "many_threads": slow_step(
        0, what=lambda: [x.start() or x.join() for x in [threading.Thread(target=burn)]]
    ),
}.items():
    HEALTHY[_name] = HangKind(_train)


@healthy
def slow_first_step(t: Loop) -> None:
    time.sleep(LONG)
    for _ in t.steps():
        pass


@healthy
def slow_compilation(t: Loop) -> None:
    with t.run.phase("compiling"):
        time.sleep(LONG)
    for _ in t.steps():
        pass


def phase(name: str, *ranks: int) -> Callable[[Loop], None]:
    def train(t: Loop) -> None:
        for step in t.steps():
            if step == AT and t.rank in ranks:
                with t.run.phase(name):
                    time.sleep(LONG)

    return train


HEALTHY["evaluation_by_one"] = HangKind(phase("evaluating", 0))
HEALTHY["evaluation_by_all"] = HangKind(phase("evaluating", 0, 1, 2, 3))
HEALTHY["checkpoint_by_one"] = HangKind(phase("checkpointing", 2))
HEALTHY["checkpoint_by_all"] = HangKind(phase("checkpointing", 0, 1, 2, 3))


@healthy
def evaluation_as_long_as_a_run(t: Loop) -> None:
    for step in t.steps():
        if step % 4 == 0:
            with t.run.phase("evaluating"):
                time.sleep(6)


@healthy
def slow_loader(t: Loop) -> None:
    load(t, 1, lambda: time.sleep(SLOW))


@healthy
def slower_and_slower(t: Loop) -> None:
    for step in t.steps(8):
        time.sleep(step)


@healthy
def long_steps(t: Loop) -> None:
    for _ in t.steps(4):
        time.sleep(7)


@healthy
def ends_unevenly(t: Loop) -> None:
    for _ in t.steps():
        pass
    time.sleep(LONG / 2 * t.rank / t.world)


@healthy
def slow_end(t: Loop) -> None:
    for _ in t.steps():
        pass
    with t.run.phase("stopping"):
        time.sleep(LONG)


def main() -> None:
    """Runs one of them, as a rank."""
    if int(os.environ.get("UNBROKEN_ATTEMPT", "1")) > 1:
        return
    (HANGS | HEALTHY)[sys.argv[1]].train(Loop())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
