"""A virtual agent with its keeper and ranks: it speaks the supervisor's messages, and costs a few timers.

What a real agent does with processes, pages and memory it does with a few numbers. What it *says*, and when it stops
for want of a lease, is the same.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...checkpoint.catalogue import announcement
from ...checkpoint.keeper.wire import PROTOCOL
from ...cluster.clocks import ClockOffset, Exchange, measure
from ...cluster.contract import AgentCommand
from ...cluster.hello import Gpu, Hello, NodeAddress
from ...detect import ProcessInfo
from ...errors import Exit
from ...link.bounds import Message, proof, same_secret
from ...link.runs import pack, unpack
from ...link.secret import Secret
from ...progress.page import Phase
from ...recover.node.supervision.reporting import group_looks
from ...version import __version__
from ...waiting import wait_within
from .keeper import FakeStorage, Snapshots, flush, list_snapshots
from .network import FakeConnection, Network
from .training import Gang, Script

_RETRY_S = 0.5
_KEPT_SNAPSHOTS = 3
_SAVE_S = 0.5
_PAIR_S = 4.0
_WINDOW = 10
_KILL = 9


@dataclass
class FakeNode:
    """A virtual node. Its clocks are its own: `booted` is when its monotonic clock was 0, `skew_s` how far its time of day
    is ahead. `snapshots` are what its keeper holds: {(attempt, step): ranks}; they outlive the agent."""

    name: str
    gpus: int = 8
    boot: int = 1
    booted: float = 0.0
    skew_s: float = 0.0
    start_s: float = 0.2
    state: str = "up"
    unfenceable: bool = False
    full: bool = False
    """Whether nothing finds room in the folder of its logs."""
    wiped: int = 0
    pair_fails: float = 0.0
    """The share of tests with another node that fail for its sake."""
    pair_rate: float = 1.0
    """The share of the usual rate that a test with it reaches."""
    bad_links: set[str] = field(default_factory=set)
    """The nodes with which each of its tests fails, for the sake of the way between them."""
    host: str = ""
    """The machine of which it is a virtual node; "" where it is a machine of its own."""
    agent: VirtualAgent | None = None
    command: AgentCommand | None = None
    """How its agent was started last."""
    snapshots: Snapshots = field(default_factory=dict)
    silent_keeper: bool = False
    """Whether its keeper answers nothing."""

    def keep(self, attempt: int, step: int, ranks: list[int]) -> None:
        """Its keeper holds these ranks' snapshot from now on, beside the two before."""
        self.snapshots.setdefault((attempt, step), set()).update(ranks)
        for old in sorted(self.snapshots)[:-_KEPT_SNAPSHOTS]:
            del self.snapshots[old]

    def wipe(self) -> None:
        """Nothing that was in its memory is left, and no order that was on its way is carried out."""
        self.agent, self.snapshots = None, {}
        self.wiped += 1


class AgentSurroundings(Protocol):
    """What a virtual agent needs of its cluster."""

    run_id: str
    loop: asyncio.AbstractEventLoop
    network: Network
    wall_offset_s: float
    storage: FakeStorage

    def number_of(self, node: str) -> int:
        """Which node it is, from 0."""

    def node_at(self, address: str) -> str:
        """The node that has this HOST:PORT; "" for none."""

    def gang(self, attempt: int, world_size: int, first: int) -> Gang:
        """The ranks of an attempt."""

    def peer_of(self, node: str) -> FakeNode | None:
        """The node whose keeper takes copies of this one's snapshots."""

    def agent_ended(self, agent: VirtualAgent, code: int | None, signal: int | None) -> None:
        """Takes note that an agent's process has ended."""


class VirtualAgent:
    """One launch of a node's agent."""

    def __init__(
        self, cluster: AgentSurroundings, node: FakeNode, launch: str, command: AgentCommand
    ) -> None:
        self._cluster, self.node, self.launch, self.command = cluster, node, launch, command
        secret = Secret.from_bytes(command.secret)
        self._token = secret.token if secret is not None else ""
        self._loop, self._network = cluster.loop, cluster.network
        self.attempt = 0
        self._pairs = 0
        self.term = 0
        self.ranks: dict[int, str] = {}
        """rank -> running, hung, ended."""
        self.slowness: dict[int, float] = {}
        """How many times as long a rank takes for its own work."""
        self.delays: dict[int, tuple[float, float]] = {}
        """(share of its steps, seconds) by which a rank is late."""
        self.looks: dict[int, ProcessInfo] = {}
        """What its process shows of a rank that hangs; of others, and where nothing is given, an endless loop."""
        self._endings: dict[int, Message] = {}
        self.lease_until: float | None = None
        self._lease_s = 15.0
        self._gang: Gang | None = None
        self._told_step = -1
        self._stop_after: int | None = None
        self._candidates: list[Message] = []
        self._link: FakeConnection | None = None
        self._ids = self._introductions = 0
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._beats: dict[int, float] = {}
        self._unsent: list[Message] = []
        self._over = False
        self._task = self._loop.create_task(self._follow_supervisors(), name=f"agent of {node.name}")

    # --- its own clocks

    def monotonic(self) -> float:
        return self._loop.time() - self.node.booted

    def wall(self) -> float:
        return self._loop.time() + self._cluster.wall_offset_s + self.node.skew_s

    # --- towards the supervisor

    async def _follow_supervisors(self) -> None:
        while not self._over:
            try:
                self._link = await self._network.connect(self.node.name, self._receive, self._lost)
                await self._introduce()
                self._beat()
                return
            except ConnectionRefusedError:
                await self._network.opened()
            except (TimeoutError, ConnectionError, ValueError):
                self._drop()
                await asyncio.sleep(_RETRY_S)

    async def _introduce(self) -> None:
        door = self._network.newest
        if door is None:
            raise ConnectionResetError
        exchanges: tuple[list[Exchange], list[Exchange]] = ([], [])
        if self._token:
            self._introductions += 1
            nonce = f"{self.launch}/{self._introductions}"  # no chance in here: the same run gives the same messages
            answer = await self._ask("prove", nonce=nonce)
            expected = proof(self._token, "supervisor", nonce, door.address.name)
            if not same_secret(answer.get("proof"), expected):
                raise ValueError("whoever listens there is not this run's supervisor")
            await self._ask("token", token=self._token)
        sent = (self.monotonic(), self.wall())
        answer = await self._ask("clock", must=False)
        for i, key in enumerate(("monotonic", "wall")):
            if answer.get("ok"):
                now = (self.monotonic(), self.wall())[i]
                exchanges[i].append(Exchange(sent[i], float(answer[key]), now))
        answer = await self._ask("hello", **self._hello(measure(exchanges[0]), measure(exchanges[1])))
        self.term = int(answer.get("epoch", self.term))
        for message in self._unsent:
            self._send(message)
        self._unsent.clear()

    def _hello(self, clock: ClockOffset, wall: ClockOffset) -> Message:
        i, name = self._cluster.number_of(self.node.name), self.node.name
        host = self.node.host or name
        facts = Hello(
            node=name, run_id=self._cluster.run_id, host=host, boot_id=f"{host}-boot-{self.node.boot}",
            interpreter="/usr/bin/python3", version=__version__, cpus=96, memory=2 << 40, memory_free=1 << 40,
            scratch="/dev/shm/unbroken", scratch_free=1 << 40,
            addresses=(NodeAddress("eth0", f"10.{i >> 16 & 255}.{i >> 8 & 255}.{i & 255}"),),
            visible=tuple(f"GPU-{name}-{g}" for g in range(self.node.gpus)),
            gpus=tuple(Gpu(f"GPU-{name}-{g}", "virtual", 80 << 30) for g in range(self.node.gpus)),
            clock=clock, wall_clock=wall,
        )  # fmt: skip
        ranks = {str(r): self._describe(r) for r in self.ranks}
        leased = self.lease_until is not None and self._loop.time() < self.lease_until
        return facts.as_message() | {
            "pid": int(self.launch.rpartition("/")[2]), "epoch": self.term, "attempt": self.attempt, "ranks": ranks, "leased": leased,
            "cleared": _GONE, "protocol": PROTOCOL, "keeper_bytes": 1 << 39,
        }  # fmt: skip

    def _describe(self, rank: int) -> Message:
        ending = self._endings.get(rank, {})
        return {
            "pid": rank + 2,
            "running": not ending,
            "attached": True,
            "ours": ending.get("ours", False),
            **ending,
        }

    async def _ask(self, op: str, *, must: bool = True, **fields: Any) -> Message:
        self._ids += 1
        future: asyncio.Future[Message] = self._loop.create_future()
        self._asked[self._ids] = future
        self._send({"op": op, "id": self._ids, **fields})
        try:
            answer = await wait_within(future, 10)
        finally:
            self._asked.clear()
        if must and not answer.get("ok"):
            raise ConnectionError(f"'{op}' was refused: {answer.get('what')}")
        return answer

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def _tell(self, **message: Any) -> None:
        """News: kept for the next supervisor where there is none."""
        if self._link is not None and not self._link.closed and self.term:
            self._send({**message, "sent": self.monotonic()})
        elif message["op"] != "progress":
            self._unsent.append({**message, "sent": self.monotonic()})

    def _beat(self) -> None:
        if self._over or self._link is None or self._link.closed:
            return
        number = len(self._beats) and max(self._beats) + 1
        self._beats[number] = self._loop.time()
        self._send({"op": "beat", "number": number, "keeper": True})
        self._loop.call_later(max(0.2, self._lease_s / 8), self._beat)

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _lost(self) -> None:
        self._link = None
        self._beats.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionResetError("the supervisor is gone"))
        if self._task.done() and not self._over:
            self._task = self._loop.create_task(self._follow_supervisors(), name=f"agent of {self.node.name}")

    def end(self) -> None:
        """The agent's process is gone, and its ranks with it (the kernel sees to that)."""
        self._over = True
        self._task.cancel()
        self._stand()
        self.ranks = {}
        if self._link is not None:
            self._link.close()

    def vanish(self) -> None:
        """The node is gone: nobody hears of an end."""
        link, self._link = self._link, None
        self.end()
        if link is not None:
            link.vanish()

    # --- what the supervisor says

    def _receive(self, line: bytes) -> None:
        message: Message = json.loads(line)
        if "answer" in message:
            future = self._asked.get(message["answer"])
            if future is not None and not future.done():
                future.set_result(message)
            return
        if message["op"] == "lease":
            self._take_lease(message)
            return
        if message["op"] == "keeper" and self.node.silent_keeper:
            return
        if message["op"] == "pair":
            self._loop.call_later(
                _PAIR_S, self._send, {"answer": message["id"], "ok": True, **self._test_pair(message)}
            )
            return
        answer = self._answer(message)
        if "id" in message:
            self._send({"answer": message["id"], "ok": True, **answer})

    def _take_lease(self, message: Message) -> None:
        sent = self._beats.pop(message["number"], None)
        if sent is None:
            return
        self._lease_s = message["seconds"]
        before, self.lease_until = self.lease_until, sent + self._lease_s
        if before is None:
            self._loop.call_at(self.lease_until, self._check_lease)

    def _check_lease(self) -> None:
        if self._over or self.lease_until is None:
            return
        if self._loop.time() < self.lease_until:
            self._loop.call_at(self.lease_until, self._check_lease)
            return
        self.lease_until = None
        self._end_ranks(code=None, signal=_KILL, ours=True)

    def _answer(self, m: Message) -> Message:
        match m["op"]:
            case "launch" if not self.node.full:
                return self._launch(m)
            case "launch" | "room":
                return {"no_room": "/logs: No space left on device" if self.node.full else ""}
            case "stop":
                if m["attempt"] == self.attempt or not self.ranks:
                    self._end_ranks(code=None, signal=m.get("signal") or _KILL, ours=True)
                    self.ranks = {}
                return _GONE
            case "stop_at":
                self._stop_after = m["step"]
                return {"furthest": self._gang.step() if self._gang else -1, "told": bool(self.ranks)}
            case "look":
                asked = unpack(m["ranks"], "ranks", 1 << 20)
                return group_looks({r: self._look(r) for r in asked if r in self.ranks})
            case "stacks":
                looked = {r: self._look(r) for r in unpack(m["ranks"], "ranks", 1 << 20) if r in self.ranks}
                return {"texts": {str(r): look.text for r, look in looked.items()}}
            case "keeper":
                return self._keeper(m["request"])
            case "port":
                return {"port": 29500 + self.attempt % 1000}
            case "pair_port":
                self._pairs += 1
                return {"port": 20000 + self._pairs % 40000}
            case "wake":
                return {"woken": None}
            case "quit":
                self._loop.call_later(2 * self._network.latency_s, self._cluster.agent_ended, self, 0, None)
                return {"closed": self._flush(m) if m.get("flush") and m.get("mark") else {"step": None}}
            case "ping" | "check" | "freeze":
                return {}
        return {"ok": False, "what": f"the agent knows no '{m['op']}'"}

    def _test_pair(self, m: Message) -> Message:
        """This side of a test of two nodes: it fails as often as this node does."""
        address, rank = m["options"]["address"], m["options"]["rank"]
        draw = random.Random(f"{self.node.name} {address} {rank}")
        bad = draw.random() < self.node.pair_fails or (
            rank == 1 and bool(self.node.bad_links & {self._cluster.node_at(address)})
        )
        rate = draw.gauss(1e9, 3e7) * self.node.pair_rate
        return {
            "passed": not bad,
            "received": not bad,
            "rate": 0.0 if bad else rate,
            "why": "it fails" if bad else "",
            "ready_s": 1.0,
        }

    # --- ranks

    def _launch(self, m: Message) -> Message:
        if m["attempt"] <= self.attempt:
            return {"ok": False, "what": f"attempt {m['attempt']} is not newer than {self.attempt}"}
        self.attempt, self._endings, self._stop_after = m["attempt"], {}, None
        self.ranks = {int(r): "running" for r in m["ranks"]}
        best = self._candidates[0]["step"] if self._candidates else -1
        self._told_step = best
        self._gang = self._cluster.gang(self.attempt, m["world_size"], best + 1)
        row = [pack(self.ranks), 0, int(Phase.STARTING), "page", self._gang.script.steps, -1]
        self._tell(op="progress", attempt=self.attempt, groups=[row], steps={})
        attempt = self.attempt

        def when_begun() -> None:
            if self.attempt == attempt and self._gang is not None:
                self._loop.call_later(
                    self._gang.script.start_s + self._gang.script.step_s, self._step, attempt
                )

        self._gang.join(len(self.ranks), when_begun, lambda: self._time_out(attempt))
        return {"seconds": 0.01, "pids": {str(r): r + 2 for r in self.ranks}}

    def _step(self, attempt: int) -> None:
        """A step is complete on all ranks: reported once for the node."""
        gang = self._gang
        if gang is None or attempt != self.attempt or self._over or not self.ranks:
            return
        step = gang.step()
        if living := [r for r, state in self.ranks.items() if state == "running" and step > self._told_step]:
            new = [[s, 0, (1.0).hex(), self.monotonic()] for s in range(self._told_step + 1, step + 1)]
            self._told_step = step
            row = [pack(living), step + 1, int(Phase.TRAINING), "page", gang.script.steps, step]
            work = self._work(step, living, gang.script)
            steps = {str(min(self.ranks)): new}
            self._tell(op="progress", attempt=attempt, groups=[row], steps=steps, work=work)
            if gang.script.save_every and (step + 1) % gang.script.save_every == 0:
                self._loop.call_later(_SAVE_S, self._save, attempt, step, living)
        if gang.finished:
            self._end_ranks(code=0, signal=None, ours=False)
        elif self._stop_after is not None and step >= self._stop_after:
            self._end_ranks(code=int(Exit.RANK_STOPPED_ON_REQUEST), signal=None, ours=False)
        elif not gang.stands:
            self._loop.call_later(gang.script.step_s, self._step, attempt)

    def _work(self, step: int, ranks: list[int], script: Script) -> list[list[float | None]]:
        """Each tenth step, what each rank worked in those ten."""
        if not script.work_s or (step + 1) % _WINDOW:
            return []
        draw = random.Random(f"{self.node.name} {self.attempt} {step}")
        each = {r: self.slowness.get(r, 1.0) * draw.gauss(1.0, script.work_noise) for r in ranks}
        rows: list[list[float | None]] = []
        for r, x in each.items():
            share, late_s = self.delays.get(r, (0.0, 0.0))
            late = late_s * sum(draw.random() < share for _ in range(_WINDOW)) / _WINDOW
            rows.append([r, step, _WINDOW, script.step_s + late, script.work_s * x + late, None])
        return rows

    def _time_out(self, attempt: int) -> None:
        if attempt == self.attempt:
            self._end_ranks(code=None, signal=6, ours=False, only="running")

    def _stand(self) -> None:
        if self._gang is not None and self.ranks:
            self._gang.stand()

    def hang(self, rank: int) -> None:
        """A rank does nothing any more."""
        self.ranks[rank] = "hung"
        self._stand()

    def end_rank(
        self, rank: int, code: int | None, signal: int | None, *, ours: bool = False, oom: bool | None = None
    ) -> None:
        """A rank's process ends, and the agent says so."""
        if self.ranks.get(rank, "ended") == "ended":
            return
        self.ranks[rank] = "ended"
        if code != 0:
            self._stand()
        ending = {"code": code, "signal": signal, "time": self.wall(), "ours": ours, "oom": oom}
        self._endings[rank] = {**ending, "at": [self.monotonic()] * 2}
        self._tell(op="exited", attempt=self.attempt, rank=rank, **self._endings[rank])

    def _end_ranks(self, code: int | None, signal: int | None, *, ours: bool, only: str = "") -> None:
        for rank, state in list(self.ranks.items()):
            if not only or state == only:
                self.end_rank(rank, code, signal, ours=ours)

    def _look(self, rank: int) -> ProcessInfo:
        stands = self.ranks[rank] == "hung"
        if stands and rank in self.looks:
            return self.looks[rank]
        frames = ["loop_forever (train.py:1)"] if stands else ["all_reduce (torch/distributed.py:1)"]
        return ProcessInfo(rank + 2, "R" if stands else "S", "", tuple(frames), frames[0])

    # --- the keeper

    def _save(self, attempt: int, step: int, ranks: list[int]) -> None:
        if attempt != self.attempt or self._over:
            return
        self.node.keep(attempt, step, ranks)
        if (peer := self._cluster.peer_of(self.node.name)) is not None:
            peer.keep(attempt, step, ranks)
        self._tell(op="keeper", event="host", attempt=attempt, step=step, ranks=pack(ranks), seconds=_SAVE_S)

    def _keeper(self, request: Message) -> Message:
        match request["op"]:
            case "attempt":
                self._candidates = announcement.unpack(request)[1]
            case "inventory":
                return list_snapshots(
                    self.node.snapshots, self._gang.world_size if self._gang is not None else 0
                )
            case "flush":
                return self._flush(request)
        return {}

    def _flush(self, m: Message) -> Message:
        gang, storage = self._cluster.gang(m["mark"][0], 0, 0), self._cluster.storage
        return flush(self.node.snapshots, m, self.command, gang.world_size, storage)


_GONE: Message = {"gone": True, "survivors": [], "proven": True, "unproven_why": ""}
