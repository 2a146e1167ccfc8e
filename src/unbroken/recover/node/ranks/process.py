"""One rank's process on its node: how it is launched, what its page and log say, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ....cluster import Ownership, Process
from ....detect.work import WorkMeter, WorkWindow
from ....errors import LeaseExpired
from ....journal.codec import decode, encode
from ....progress import PageReader, Phase, StepRecord
from ....progress import page as pages_module
from ....progress.page import NO_STOP
from ...wire import Message
from ..logs.folder import NodeFolder
from ..logs.log_follower import LogFollower
from ..warm.process import RankStart
from .counters import NodeCounters
from .flight import ask_for_dump, record_flight, remove_pipes
from .kernel_log import KernelLog
from .memory_kills import MemoryKill, MemoryKills

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_OOM_FIRST = "1000"
"""Before any process that has not the same, however large that is; raising it needs no right."""
_CPU_IDLE_SHARE = 0.01
_CPU_EVERY_S = 1.0


@dataclass(frozen=True)
class LaunchOrder:
    """What the supervisor tells one node's agent to start. `ranks` maps rank to local rank."""

    attempt: int
    run_id: str
    command: tuple[str, ...]
    cwd: str
    ranks: dict[int, int]
    world_size: int
    slot: int
    slots: int
    nproc: int
    master_addr: str
    master_port: int
    restarts: int
    devices: str | None = None
    follow_log: bool = True
    interface: str = ""
    """The network interface of the node by which the ranks reach each other; "" where they are on one machine."""
    resume_from: str = ""
    """The newest whole checkpoint that the script itself wrote; "" where there is none."""
    skips: str = ""
    """Samples that are never used, as `UNBROKEN_SKIPS` says them."""
    world_sizes: str = ""
    """With how many ranks the run may go on, as `UNBROKEN_WORLD_SIZES` says them; "" where with one number alone."""
    warm_after: float | None = None
    """So many seconds after the first step warm processes are made for the attempt that may follow; None for none."""
    cold: bool = False
    """Whether all start cold, also where a warm process is ready."""

    def as_message(self) -> Message:
        message: Message = encode(self)
        return message

    @classmethod
    def from_message(cls, message: Message) -> LaunchOrder:
        """The order that was sent; keys of a newer version are passed over. Raises InputError."""
        return decode(cls, message, newer=True)

    def environment(self, rank: int, local_rank: int) -> dict[str, str]:
        """What torchrun would set, so that an unchanged torchrun script works."""
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "GROUP_RANK": str(self.slot),
            "GROUP_WORLD_SIZE": str(self.slots),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_MAX_RESTARTS": "1000000",
            "TORCHELASTIC_RUN_ID": f"{self.run_id}-{self.attempt}",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "PYTHONUNBUFFERED": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        if "OMP_NUM_THREADS" not in os.environ:
            env["OMP_NUM_THREADS"] = "1"
        if self.interface:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                if name not in os.environ:
                    env[name] = self.interface
        if self.resume_from:
            env["UNBROKEN_RESUME_FROM"] = self.resume_from
        if self.devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = self.devices
        return env


class RankProcess:
    """A launched rank. `killed_by_agent` says that we ended it ourselves, so that its end explains nothing."""

    def __init__(
        self,
        process: Process,
        start: RankStart,
        follow_log: bool,
        counters: NodeCounters | None = None,
        kernel_log: KernelLog | None = None,
    ) -> None:
        """`prepare_files` was called for this start. `counters` are those of the node's GPUs, `kernel_log` is from before the process
        was started."""
        self._process, self.rank, self.attempt = process, start.rank, start.attempt
        self._page = PageReader(Path(start.env["UNBROKEN_PAGE"]))
        self._env = start.env
        self.pid = process.pid
        self.killed_by_agent = False
        self._told_end = False
        self._ended_at: float | None = None
        self._ended_between: tuple[float, float] | None = None
        self._ran_at = time.monotonic()
        """When it was last seen to run: it ended after that."""
        self._sign: tuple[int, int] | None = None
        self._log = LogFollower(start.log, enabled=follow_log)
        self._memory_kill = MemoryKill(None)
        self._memory_kills = MemoryKills(process.pid, kernel_log or KernelLog())
        self._cpu = 0.0
        self._cpu_at = 0.0
        self._busy_count = 0
        gpu = counters.of_rank(start.env) if counters is not None else None
        self._meter = WorkMeter(process.pid, on_processor=not start.env.get("CUDA_VISIBLE_DEVICES"), gpu=gpu)
        self.work: WorkWindow | None = None
        """Its newest window, until somebody takes it."""

    @property
    def running(self) -> bool:
        return self._poll() is None

    def _poll(self) -> int | None:
        """Its exit code, None while it runs."""
        now = time.monotonic()
        code = self._process.poll()
        if code is None:
            self._ran_at = now
        elif self._ended_between is None:
            self._ended_between = (self._ran_at, time.monotonic())
        return code

    @property
    def attached(self) -> bool:
        """Whether the script told its page of itself (it calls `unbroken.attach()`)."""
        return self._page.read().pid != 0

    def describe(self) -> Message:
        """The state for a successor of the supervisor."""
        code = self._poll()
        return {
            "pid": self.pid, "running": code is None, "attached": self.attached, "ours": self.killed_by_agent,
            **({} if code is None else self.ending()),
        }  # fmt: skip

    def just_ended(self) -> bool:
        """True once, when the process has ended."""
        if self._told_end or self._poll() is None:
            return False
        self._told_end = True
        return True

    def expire(self, since: float) -> None:
        """Notes that the rank ends for a lease that expired at `since` (CLOCK_MONOTONIC), which is then its time.

        That is our doing and no failure of the rank's, and what failed elsewhere later may have followed from it.
        """
        self.killed_by_agent = True
        self._ended_at, self._ended_between = time.time() - (time.monotonic() - since), (since, since)

    def ending(self) -> Message:
        """How it ended. `time` is seconds since the epoch, by this node's clock; `at` the earliest and the latest that it may
        have been, on CLOCK_MONOTONIC."""
        code = self._poll()
        if code is None:
            return {}
        # A rank may find its lease expired before its agent does, and end with whatever code its script has for that.
        expired = self._page.expired_at()
        if self._ended_at is None:
            if expired is not None:
                self.expire(expired)
            else:
                self._ended_at = time.time()
                if code == -signal.SIGKILL and not self.killed_by_agent:
                    self._memory_kill = self._memory_kills.was_killed()
        if code == 0 and expired is not None:
            code = LeaseExpired.exit_code  # its script caught it: it is not done
        return {
            "code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "time": self._ended_at,
            "at": list(self._ended_between) if self._ended_between is not None else None,
            "ours": self.killed_by_agent,
            "oom": self._memory_kill.oom,
            "oom_counted": self._memory_kill.counted,
        }

    def send(self, sig: int) -> None:
        """Signals the process if it runs."""
        if self.running:
            try:
                os.kill(self.pid, sig)
                if sig == signal.SIGKILL:
                    return
            except ProcessLookupError:
                return

    def set_lease(self, until: float, term: int) -> None:
        self._page.set_lease(until, term)

    def ask_for_dump(self) -> bool:
        """Asks its NCCL for a flight-recorder dump, which appears beside its log a moment later."""
        return ask_for_dump(self._env, self.rank)

    def stop_at(self, step: int) -> int:
        """Asks for a stop after `step`; returns the furthest step that the page shows after that."""
        self._page.set_stop(step)
        last = self._page.read().last
        return last.step if last is not None else -1

    def sample(self, now: float, *, final: bool = False) -> Message | None:
        """News since the last look (steps, phase, signs of life), or None. `now` is CLOCK_MONOTONIC.

        `final` says that the rank is gone: then the end of its log is read, whatever lies before.
        """
        if not final:
            self._memory_kills.look(now)
        progress = self._page.read()
        records = self._page.take()
        source = "page"
        if progress.pid == 0:
            records, source = self._log.finish(now) if final else self._log.poll(now), "log"
            if not self._log.learnt:
                # What looks like a step is not believed before it has advanced a few times.
                records, source = [], "idle"
                self._watch_cpu(now)
        else:
            training = progress.phase is not Phase.EVALUATING
            window = self._meter.take(
                progress.count, records, now, progress.peers, progress.data_s, training=training
            )
            if window is not None:
                self.work = window
        count = {"page": progress.count, "log": self._log.count, "idle": self._busy_count}[source]
        phase = progress.phase
        if source != "page" and count:
            phase = Phase.TRAINING
        sign = (count, int(phase))
        if not records and sign == self._sign:
            return None
        self._sign = sign
        return {
            "count": count,
            "phase": int(phase),
            "source": source,
            "total": progress.total_steps,
            "steps": [_record(r) for r in records],
        }

    def _watch_cpu(self, now: float) -> None:
        """Counts a sign of life for each second in which the rank and its children used a processor."""
        if now - self._cpu_at < _CPU_EVERY_S:
            return
        try:
            me = psutil.Process(self.pid)
            used = sum(sum(p.cpu_times()[:2]) for p in [me, *me.children(recursive=True)])
        except psutil.Error:
            return
        if used - self._cpu > _CPU_IDLE_SHARE * (now - self._cpu_at) or not self._cpu_at:
            self._busy_count += 1
        self._cpu, self._cpu_at = used, now

    def close(self) -> None:
        """Frees page and log; call it when the process is gone."""
        self._log.close()
        self._page.close()


def _record(r: StepRecord) -> list[Any]:
    # hex keeps every bit of the loss; NaN and infinity have no JSON form.
    # A norm is a fifth, where there is one.
    norm = [] if r.norm is None else [float(r.norm).hex()]
    return [r.step, r.tokens, float(r.loss).hex(), r.time, *norm]


def describe_start(
    order: LaunchOrder,
    rank: int,
    local_rank: int,
    folder: NodeFolder,
    node: str,
    pages: Path,
    keeper_socket: Path,
) -> RankStart:
    """What a rank is started with."""
    env = {
        **os.environ,
        **order.environment(rank, local_rank),
        "UNBROKEN_ROLE": "rank",
        "UNBROKEN_RUN_ID": order.run_id,
        "UNBROKEN_RUN_DIR": str(folder.run.path),
        "UNBROKEN_NODE": node,
        "UNBROKEN_OUTPUT": str(folder.own.output(order.attempt)),
        "UNBROKEN_ATTEMPT": str(order.attempt),
        "UNBROKEN_PAGE": str(pages / f"rank-{rank}.a{order.attempt:04d}.page"),
        "UNBROKEN_KEEPER": str(keeper_socket),
        "UNBROKEN_SKIPS": order.skips,
        "UNBROKEN_WORLD_SIZES": order.world_sizes,
    }
    log = folder.own.rank_log(order.attempt, node, rank)
    if order.devices is not None:
        env |= record_flight(log, pages, order.attempt)
    return RankStart(rank, order.attempt, tuple(_argv(order.command)), order.cwd, env, log)


async def end_by(sig: int, ranks: Collection[RankProcess], grace_s: float, hurry: asyncio.Event) -> None:
    """Sends them a signal and waits for their end: so long at most, and no longer once `hurry` is set."""
    for process in ranks:
        process.killed_by_agent = True
        process.send(sig)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and not hurry.is_set() and any(p.running for p in ranks):
        await asyncio.sleep(0.02)


def ask_to_stop(ranks: Collection[RankProcess], step: int) -> Message:
    """Asks all ranks to stop after `step`; the answer has the furthest step seen after that was written."""
    furthest = max((r.stop_at(step) for r in ranks), default=NO_STOP)
    return {"furthest": furthest, "told": bool(ranks) and all(r.attached for r in ranks)}


def prepare_files(start: RankStart) -> None:
    """Makes a rank's page, its log, and the folder of its output: all that needs room before it runs. Raises OSError."""
    page = Path(start.env["UNBROKEN_PAGE"])
    for old in page.parent.glob(f"rank-{start.rank}.a*.page"):
        old.unlink(missing_ok=True)
    remove_pipes(page.parent, start.rank)
    pages_module.create(page, rank=start.rank, attempt=start.attempt)
    start.log.parent.mkdir(parents=True, exist_ok=True)
    Path(start.env["UNBROKEN_OUTPUT"]).mkdir(parents=True, exist_ok=True)
    start.log.touch()


def run_cold(start: RankStart, node: str, owner: Ownership) -> Process:
    """Starts a rank's process, held by `owner`; its output goes straight into its log file, so that no kill loses a line."""
    held = owner.start_rank(node, start.attempt, start.argv)

    def enter() -> None:
        held.enter()
        as_a_rank()

    try:
        with open(start.log, "ab", buffering=0) as out:
            return (held.spawn or subprocess.Popen)(
                held.argv,
                cwd=start.cwd,
                env=start.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=enter,
            )
    finally:
        held.close()


def _argv(command: tuple[str, ...]) -> list[str]:
    """A Python script or module is run by this interpreter; anything else is run as it is."""
    first = command[0]
    if first.endswith(".py"):
        return [sys.executable, "-u", *command]
    if first == "-m":
        return [sys.executable, "-u", *command]
    if first in ("python", "python3"):
        return [sys.executable, "-u", *command[1:]]
    return list(command)


def as_a_rank() -> None:
    """A rank never outlives its agent (the kernel kills it when the agent dies), hears the signals that the agent does not,
    and goes first where memory runs out: the keeper, which holds the snapshots, is mostly the largest process."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write(_OOM_FIRST)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # What is ignored stays ignored in children: SIGTERM could end neither the script nor its data loaders.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
