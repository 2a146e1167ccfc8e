"""A keeper with an agent and ranks that are no trainers: for tests of keepers, without torch and in milliseconds.

agent = FakeAgent(folder)                 # starts a real keeper process
agent.attempt(1, ranks=2)
rank = FakeRank(agent, rank=0, world_size=2, attempt=1)
rank.save(step=5, fill=7, persist=True)
"""

from __future__ import annotations

import mmap
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.checkpoint.client.links import (
    KeeperLink,
    RankLink,
    keeper_command,
    start_keeper,
)
from unbroken.checkpoint.format import layout as arena
from unbroken.checkpoint.format.manifest import FileRecord, PartManifest, Sharding, data_name, tensor_part
from unbroken.checkpoint.keeper.wire import Message
from unbroken.journal.checksummed import decode_checked
from unbroken.progress.records.candidate import Candidate


def alive(pid: int) -> bool:
    """Whether this process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@dataclass(frozen=True)
class Holding:
    """One rank's whole snapshot in a keeper's memory. `everywhere`: it is known that all ranks of the run have theirs."""

    attempt: int
    step: int
    rank: int
    bytes: int
    everywhere: bool
    world_size: int = 0
    peer: bool = False


class AgentLink(KeeperLink):
    """The agent's side. Every method waits for the keeper's answer; `events()` yields what the keeper reports."""

    def __init__(self, socket_path: str | Path, *, timeout_s: float = 5.0) -> None:
        self._events: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        super().__init__(socket_path, {"role": "agent"}, timeout_s=timeout_s)

    @property
    def pid(self) -> int:
        """The keeper's process."""
        return int(self.info["pid"])

    def attempt(
        self, attempt: int, world_size: int, ranks: Mapping[int, int], candidates: Sequence[Candidate] = (),
        ring: Mapping[str, Message] | None = None,
    ) -> None:  # fmt: skip
        """Begins an attempt here, with these ranks {rank: local rank}; older attempts are refused from now on. `ring` says where
        other nodes' keepers give what these ranks will restore."""
        self.request(
            {
                "op": "attempt", "attempt": attempt, "world_size": world_size,
                "ranks": {str(r): local for r, local in ranks.items()},
                "candidates": [c.as_json() for c in candidates], "ring": ring,
            }
        )  # fmt: skip

    def ring(self) -> Message:
        """Where the keeper gives snapshots to those of other nodes."""
        member: Message = self.request({"op": "ring"})[0]["ring"]
        return member

    def inventory(self) -> list[Holding]:
        """What is in the keeper's memory."""
        answer, _ = self.request({"op": "inventory"})
        return [
            Holding(
                h["attempt"], h["step"], h["rank"], h["bytes"], h.get("everywhere", False), h.get("world_size", 0),
                h.get("peer", False),
            )
            for h in answer["inventory"]
        ]  # fmt: skip

    def complete(self, attempt: int, step: int) -> None:
        """Tells that every rank of the run has this snapshot in memory."""
        self.request({"op": "complete", "attempt": attempt, "step": step})

    def settle(self, attempt: int, deadline_s: float, gone: Collection[int] = ()) -> list[int]:
        """Finishes or abandons this attempt's writes; afterwards it writes nothing more. The durable steps of it.

        `gone` are the ranks whose node is lost: for their shares nobody waits.
        Raises KeeperRefused if a write cannot be stopped (a disk that does not answer).
        """
        answer, _ = self.request(
            {"op": "settle", "attempt": attempt, "deadline_s": deadline_s, "gone": list(gone)},
            timeout_s=deadline_s + 10.0,
        )
        return [int(s) for s in answer["durable"]]

    def flush(self, deadline_s: float, *, room_s: float = 0.0) -> int | None:
        """Makes the newest snapshot that is complete on all ranks durable; its step, None if there is none.

        A storage that refuses is asked again for `room_s`.
        """
        answer, _ = self.request(
            {"op": "flush", "deadline_s": deadline_s, "room_s": room_s}, timeout_s=deadline_s + room_s + 5.0
        )
        return answer["step"]  # type: ignore[no-any-return]

    def hurry(self) -> None:
        """Ends the wait of a flush for a storage that refuses."""
        self.request({"op": "hurry"})

    def lease(self, seconds: float) -> None:
        """Renews the lease."""
        self.request({"op": "lease", "seconds": seconds})

    def ping(self, timeout_s: float | None = None) -> list[Message]:
        """What is being written, with `idle_s` since each writer moved. Raises KeeperGone if nothing answers."""
        answer, _ = self.request({"op": "ping"}, timeout_s=timeout_s)
        return list(answer["writing"])

    def close(self, flush: bool = True, deadline_s: float = 30.0) -> int | None:
        """As `flush` if wanted, then the keeper frees all and exits. The step that was flushed."""
        answer, _ = self.request(
            {"op": "close", "flush": flush, "deadline_s": deadline_s}, timeout_s=deadline_s + 5.0
        )
        self.disconnect()
        return answer.get("step")

    def events(self, timeout_s: float | None = None) -> Iterator[Message]:
        """Yields events as they come; ends when the connection does, or after `timeout_s` without one."""
        while True:
            try:
                event = self._events.get(timeout=timeout_s)
            except queue.Empty:
                return
            if event is None:
                self._events.put(None)
                return
            yield event

    def on_event(self, event: Message) -> None:
        """Queues the event for `events`."""
        self._events.put(event)

    def on_close(self) -> None:
        """Ends `events`."""
        self._events.put(None)


class FakeAgent:
    """Starts a keeper for `checkpoints` and speaks to it as an agent does; `events` are all that it heard."""

    def __init__(
        self, folder: Path, *, node: str = "node-000", budget: int = 64 << 20, checkpoints: Path | str | None = None,
        lease_s: float | None = None, orphan_grace_s: float = 30.0, connect: bool = True, extra: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.folder = folder
        self.node = node
        self.checkpoints = str(checkpoints or folder / "checkpoints")
        self.scratch = Path(tempfile.mkdtemp(prefix="unbroken-test-"))  # short: a socket's path has 107 bytes
        self.socket = self.scratch / "keeper.sock"
        self.log = folder / f"{node}.keeper.log"
        self.command = [
            *keeper_command(
                self.socket, node=node, run_id="test", checkpoints=self.checkpoints, budget=budget,
                orphan_grace_s=orphan_grace_s, lease_s=lease_s,
            ),
            *extra,
        ]  # fmt: skip
        self.events: list[Message] = []
        self.pid = start_keeper(self.command, self.socket, self.log)
        if connect:
            self.connect()

    def connect(self) -> None:
        """Connects, as an agent that was started again does."""
        self.link = AgentLink(self.socket)
        self._listener = threading.Thread(target=self._listen, args=(self.link,), daemon=True)
        self._listener.start()

    def _listen(self, link: AgentLink) -> None:
        self.events.extend(iter_append(link, self.events))

    def attempt(self, number: int, ranks: int | dict[int, int] = 1, world_size: int | None = None,
                candidates: Sequence[Candidate] = (), ring: Mapping[str, Message] | None = None) -> None:  # fmt: skip
        """Begins an attempt with these ranks on this node."""
        here = {r: r for r in range(ranks)} if isinstance(ranks, int) else ranks
        self.link.attempt(number, world_size or len(here), here, candidates, ring)

    def heard(self, kind: str, **fields: Any) -> Message | None:
        """The first event of this kind with these fields."""
        return next(
            (
                e
                for e in self.events
                if e.get("event") == kind and all(e.get(k) == v for k, v in fields.items())
            ),
            None,
        )

    def respawn(self) -> None:
        """Starts a new keeper on the same socket, as an agent does when the old one died."""
        self.pid = start_keeper(self.command, self.socket, self.log)
        self.connect()

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Signals the keeper and, if that ends it, waits until it is gone."""
        os.kill(self.pid, sig)
        if sig == signal.SIGKILL:
            until(lambda: not alive(self.pid))

    def end(self) -> None:
        """Kills the keeper and removes its scratch folder."""
        if alive(self.pid):
            os.kill(self.pid, signal.SIGKILL)
        for path in self.scratch.glob("*"):
            path.unlink()
        self.scratch.rmdir()


def iter_append(link: AgentLink, into: list[Message]) -> list[Message]:
    """Appends events as they come; ends with the connection."""
    for event in link.events():
        into.append(event)
    return []


class FakeRank:
    """A rank whose state is one tensor of bytes, all of them `fill`."""

    def __init__(
        self, agent: FakeAgent, *, rank: int = 0, world_size: int = 1, attempt: int = 1, size: int = 1 << 20,
        count: int = 3,
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self.attempt, self.size = rank, world_size, attempt, size
        self.events: list[Message] = []
        self.link = RankLink(
            agent.socket, rank=rank, attempt=attempt, world_size=world_size, local_rank=rank,
            listener=self.events.append, timeout_s=15.0,
        )  # fmt: skip
        self.layout = arena.plan([arena.TensorSpec("data", "U8", (size,))])
        self.maps: dict[int, mmap.mmap] = {}
        self.count = count

    def buffers(self) -> list[int]:
        """Asks for buffers and maps them; their numbers."""
        answer, fds = self.link.request({"op": "arena", "bytes": self.layout.file_bytes, "count": self.count})
        for b, fd in zip(answer["buffers"], fds, strict=True):
            self.maps[b["id"]] = mmap.mmap(fd, b["bytes"])
            os.close(fd)
        return list(self.maps)

    def part(self, step: int) -> dict[str, Any]:
        """This rank's part, but for its file's record."""
        tensor = tensor_part(self.rank, self.layout, "data", "uint8", Sharding.whole((self.size,)))
        part = PartManifest(
            "test", self.attempt, step, self.rank, self.world_size, {"data": tensor},
            FileRecord(data_name(self.rank), self.layout.file_bytes, ()), values={"step": step},
        )  # fmt: skip
        body = dict(decode_checked(part.encoded, "unbroken.checkpoint.part", where="test").value)
        return {k: v for k, v in body.items() if k not in ("check", "kind", "schema", "file")}

    def claim(self, *, now: bool = False) -> int | None:
        """A buffer to fill."""
        if not self.maps:
            self.buffers()
        answer, _ = self.link.request({"op": "claim", "bytes": self.layout.file_bytes, "now": now})
        number: int | None = answer["buffer"]
        return number

    def fill(self, buffer: int, fill: int) -> None:
        """Writes header and data."""
        start = self.layout.data_start
        self.maps[buffer][:start] = self.layout.header()
        self.maps[buffer][start : start + self.size] = bytes([fill]) * self.size

    def finalize(self, buffer: int, step: int, *, persist: bool = False, periodic: bool = False) -> None:
        """Says that the buffer is whole; a `periodic` checkpoint may be left out for a newer one."""
        self.link.request(
            {
                "op": "seal", "buffer": buffer, "step": step, "file_bytes": self.layout.file_bytes,
                "world_size": self.world_size, "part": self.part(step), "persist": persist, "periodic": periodic, "seconds": 0.0,
            }
        )  # fmt: skip

    def save(self, step: int, fill: int = 1, *, persist: bool = False, periodic: bool = False) -> int:
        """A whole snapshot; the buffer that holds it."""
        buffer = self.claim()
        assert buffer is not None
        self.fill(buffer, fill)
        self.finalize(buffer, step, persist=persist, periodic=periodic)
        return buffer

    def fetch(self, attempt: int, step: int) -> tuple[int, int] | None:
        """(first, last) data byte of this rank's snapshot in memory, None if it is not there."""
        answer, fds = self.link.request({"op": "fetch", "attempt": attempt, "step": step, "rank": self.rank})
        if not answer["found"]:
            return None
        with mmap.mmap(fds[0], answer["bytes"]) as m:
            found = m[self.layout.data_start], m[answer["file_bytes"] - 1]
        os.close(fds[0])
        self.link.request({"op": "release"})
        return found

    def heard(self, kind: str, **fields: Any) -> Message | None:
        """The first event of this kind with these fields."""
        return next(
            (
                e
                for e in self.events
                if e.get("event") == kind and all(e.get(k) == v for k, v in fields.items())
            ),
            None,
        )

    def die(self) -> None:
        """The connection breaks, as when the process is killed."""
        self.link.disconnect()


class SharedAgreement:
    """The agreement of ranks that are threads of one process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.values: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self.changed = threading.Condition()

    def of(self, rank: int) -> _Member:
        """One rank's view of it."""
        return _Member(self, rank)


class _Member:
    def __init__(self, shared: SharedAgreement, rank: int) -> None:
        self.shared, self.rank, self.world_size = shared, rank, shared.world_size

    def publish(self, key: str, value: Any) -> None:
        with self.shared.changed:
            self.shared.values[key] = value
            self.shared.changed.notify_all()

    def read(self, key: str, *, timeout_s: float) -> Any:
        with self.shared.changed:
            if not self.shared.changed.wait_for(lambda: key in self.shared.values, timeout_s):
                raise TimeoutError(key)
            return self.shared.values[key]

    def peek(self, key: str) -> Any:
        return self.shared.values.get(key)

    def decide(self, key: str, proposal: Any) -> Any:
        with self.shared.changed:
            return self.shared.values.setdefault(key, proposal)

    def count(self, key: str, by: int = 1) -> int:
        with self.shared.changed:
            self.shared.counts[key] = self.shared.counts.get(key, 0) + by
            return self.shared.counts[key]


def until(condition: Callable[[], object], within_s: float = 15.0) -> None:
    """Waits for a condition. Raises AssertionError."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come true within {within_s} s")
        time.sleep(0.01)


def keeper_pid(scratch: Path) -> int:
    """The process of the one keeper that runs under this scratch folder."""
    (socket,) = scratch.glob("*/*/keeper.sock")
    link = KeeperLink(socket, {"role": "visitor"}, timeout_s=5.0)
    link.disconnect()
    return int(link.info["pid"])


def end_keepers(scratch: Path) -> None:
    """Kills every keeper that was started under this scratch folder, stopped ones too."""
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"unbroken.checkpoint.keeper" in words and any(
            w.startswith(f"{scratch}/".encode()) for w in words
        ):
            with suppress(ProcessLookupError):
                os.kill(int(proc.name), signal.SIGKILL)
