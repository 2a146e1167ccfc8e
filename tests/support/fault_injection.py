"""The fault-injection test: a training of several ranks whose processes, keepers, nodes and files are struck at random.

    python -m tests.support.fault_injection --rounds 500 --seed 1

Each round is an attempt: ranks (real processes with a real Checkpointer) restore, step and save until something
happens to them: kill -9 of a rank, of all ranks, of a keeper, of a whole node (keeper, ranks, memory), a keeper
stopped, a disk that is full, an agent that comes back; and between attempts files of checkpoints are flipped, cut
or removed. After each round it is checked that

    nothing torn passes       every folder with a valid marker verifies, but for those that were damaged here
    nothing announced is lost every checkpoint that a rank was told is durable is there and verifies
    all ranks agree           every rank restored the same step, of the newest that is whole, with the right bytes

The state of rank r at step s is a pure function of (r, s), with no two elements alike, so every restored byte can be
compared, and its place. With `--megabytes 40` a share has several chunks of a checksum. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.keepers import FakeAgent, alive, until
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.client.links import KeeperGone
from unbroken.checkpoint.storage import open_storage
from unbroken.errors import UnbrokenError
from unbroken.progress.records.candidate import Candidate, folder_name

SIZE = 0.16  # megabytes a rank
PERSIST = 3


class Pattern:
    """The tensors of rank r at step s: integers that differ from element to element, and two smaller types."""

    def __init__(self, rank: int, megabytes: float) -> None:
        import torch

        n = int(megabytes * 1e6 / 4)
        self.rank = rank
        self.base = (torch.arange(n, dtype=torch.int64) * 2654435761 % 2**31).to(torch.int32)
        self.whole = torch.zeros(n, dtype=torch.int32)
        self.odd = torch.zeros(7, 3, dtype=torch.bfloat16)
        self.long = torch.zeros(3, dtype=torch.int64)
        self.due = torch.zeros(n, dtype=torch.int32)

    @property
    def tensors(self) -> dict[str, Any]:
        """What is saved and restored in place."""
        return {"whole": self.whole, "odd": self.odd, "long": self.long}

    def advance(self, step: int) -> None:
        """Makes it the state of this step."""
        self._into(self.whole, step)
        self.odd.copy_(self._odd(step))
        self.long.copy_(self._long(step))

    def right(self, step: int) -> bool:
        """Whether it is the state of this step, to the last bit."""
        self._into(self.due, step)
        pairs = [(self.whole, self.due), (self.odd, self._odd(step)), (self.long, self._long(step))]
        return all(bool((a == b).all()) for a, b in pairs)

    def _into(self, out: Any, step: int) -> None:
        import torch

        torch.bitwise_xor(self.base, (self.rank * 1_000_003 + step) % 2**31, out=out)

    def _odd(self, step: int) -> Any:
        import torch

        return (torch.arange(21).reshape(7, 3) + step % 100 + self.rank).to(torch.bfloat16)

    def _long(self, step: int) -> Any:
        import torch

        return torch.tensor([self.rank, step, step * 2**40])


def rank_main(
    folder: str,
    port: int,
    attempt: int,
    rank: int,
    world: int,
    local: int,
    node: str,
    socket: str,
    size: float,
) -> None:
    """One rank of one attempt; it writes what happens to it to `said/`, a line each, until it is killed."""
    import torch
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from unbroken.checkpoint import checkpointer as module
    from unbroken.checkpoint.client import session
    from unbroken.checkpoint.ranks.agreement import ThroughStore
    from unbroken.checkpoint.ranks.environment import Place

    torch.set_num_threads(1)
    logging.basicConfig(filename=f"{folder}/said/{attempt:05d}-{rank}.log", level=logging.INFO)
    store = TCPStore("127.0.0.1", port, is_master=False)
    prefix: Any = PrefixStore(f"attempt-{attempt}", store)
    vars(session)["agreement"] = lambda *_: ThroughStore(prefix, rank, world)
    where = Place(rank, world, rank % local, node, "campaign", attempt, Path(socket), None)
    vars(module)["place"] = lambda: where
    said = os.open(f"{folder}/said/{attempt:05d}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)

    def say(**what: Any) -> None:
        os.write(said, (json.dumps(what) + "\n").encode())

    c = module.Checkpointer(
        Path(folder) / "checkpoints",
        snapshot_every=1,
        persist_every=PERSIST,
        keep=100_000,
        memory=memory_of(size, local),
    )
    pattern = Pattern(rank, size)
    state: dict[str, Any] = {**pattern.tensors, "step": 0}
    restored = c.restore(state)
    step = restored.step if restored else 0
    right = restored is None or (pattern.right(step) and state["step"] == step)
    say(
        restored=step,
        attempt=restored.attempt if restored else 0,
        source=restored.source if restored else "",
        right=right,
    )
    waiting: list[Any] = []
    while True:
        step += 1
        pattern.advance(step)
        state["step"] = step
        saved = c.save(step, state)
        if saved.disk is not None:
            waiting.append(saved)
        for s in [s for s in waiting if s.disk.done()]:
            waiting.remove(s)
            say(durable=s.step, attempt=s.attempt) if s.disk.exception() is None else say(failed=s.step)
        time.sleep(0.004)


def memory_of(megabytes: float, local: int) -> int:
    """Bytes that a node's keeper may take: three buffers a rank and some."""
    return max(64 << 20, int(megabytes * 1e6 * 3.5 * local))


@dataclass
class FaultInjection:
    """`nodes` nodes with `local` ranks each; everything lies under `folder`."""

    folder: Path
    seed: int
    nodes: int = 2
    local: int = 2
    megabytes: float = SIZE
    """Of each rank's state."""
    strikes: Counter[str] = field(default_factory=Counter)
    damaged: set[str] = field(default_factory=set)
    announced: set[tuple[int, int]] = field(default_factory=set)
    seals: list[str] = field(default_factory=list)
    attempt: int = 0

    def __post_init__(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.random = random.Random(self.seed)
        (self.folder / "said").mkdir(parents=True)
        self.storage = open_storage(self.folder / "checkpoints")
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "unbroken.checkpoint.checkpointer"])
        self.agents = [self._agent(i) for i in range(self.nodes)]

    def _agent(self, i: int) -> FakeAgent:
        return FakeAgent(
            self.folder,
            node=f"node-{i:03d}",
            checkpoints=self.folder / "checkpoints",
            extra=["--keep", "100000"],
            budget=memory_of(self.megabytes, self.local),
        )

    @property
    def world(self) -> int:
        return self.nodes * self.local

    def round(self) -> None:
        """One attempt, one strike, all checks. Raises AssertionError."""
        self.attempt += 1
        self._repair()
        candidates = self._candidates()
        for i, agent in enumerate(self.agents):
            here = {i * self.local + j: j for j in range(self.local)}
            agent.attempt(self.attempt, ranks=here, world_size=self.world, candidates=candidates)
        ranks = [self._start(r) for r in range(self.world)]
        try:
            until(lambda: all(self._said(self.attempt, r) for r in range(self.world)), 120)
            self._check_agreement(candidates)
            self._live(self.random.uniform(0.0, 0.8), ranks)
            self._strike(ranks)
            self._live(self.random.uniform(0.0, 0.3), ranks)
        finally:
            for p in ranks:
                p.kill()
            for p in ranks:
                p.join(10)
        self._seal()
        self._check_disk()
        if self.random.random() < 0.3:
            self._damage()

    def close(self) -> None:
        """Ends everything; says whether a process is left."""
        for agent in self.agents:
            agent.end()
        until(lambda: not any(alive(a.pid) for a in self.agents))

    def _start(self, r: int) -> Any:
        agent = self.agents[r // self.local]
        p = self.context.Process(
            target=rank_main,
            args=(
                str(self.folder),
                self.store.port,
                self.attempt,
                r,
                self.world,
                self.local,
                agent.node,
                str(agent.socket),
                self.megabytes,
            ),
            daemon=True,
        )
        p.start()
        return p

    def _live(self, seconds: float, ranks: list[Any]) -> None:
        """Does the supervisor's work for a while: tells the keepers what is whole on all ranks."""
        end = time.monotonic() + seconds
        while True:
            self._spread()
            if time.monotonic() >= end:
                return
            time.sleep(0.01)

    def _spread(self) -> None:
        held: dict[int, set[int]] = {}
        for agent in self.agents:
            for e in list(agent.events)[-400:]:
                if e.get("event") == "host" and e["attempt"] == self.attempt:
                    held.setdefault(e["step"], set()).add(e["rank"])
        whole = [s for s, r in held.items() if len(r) == self.world]
        for agent in self.agents:
            if whole and alive(agent.pid):
                try:
                    agent.link.complete(self.attempt, max(whole))
                except UnbrokenError:
                    continue

    def _strike(self, ranks: list[Any]) -> None:
        kinds = ["rank", "all ranks", "keeper", "node", "agent", "stop keeper", "full disk"]
        what = self.random.choices(kinds, weights=[4, 3, 4, 3, 1, 2, 2])[0]
        self.strikes[what] += 1
        i = self.random.randrange(self.nodes)
        agent = self.agents[i]
        if what == "rank":
            self.random.choice(ranks).kill()
        elif what == "all ranks":
            for p in ranks:
                p.kill()
        elif what == "keeper":
            agent.kill()
            if self.random.random() < 0.5:  # in the same attempt: the ranks hand their memory on
                agent.respawn()
                here = {i * self.local + j: j for j in range(self.local)}
                agent.attempt(self.attempt, ranks=here, world_size=self.world)
                self._live(0.3, ranks)
        elif what == "node":
            for p in ranks[i * self.local : (i + 1) * self.local]:
                p.kill()
            agent.kill()
        elif what == "agent":
            agent.link.disconnect()
            agent.connect()
        elif what == "stop keeper":
            os.kill(agent.pid, signal.SIGSTOP)
            self._pause(0.3)
            os.kill(agent.pid, signal.SIGCONT)
        elif what == "full disk":
            soft, hard = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(
                agent.pid,
                resource.RLIMIT_FSIZE,
                (self.random.randrange(100, int(self.megabytes * 1e6)), hard),
            )
            self._live(0.3, ranks)
            resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (soft, hard))

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _repair(self) -> None:
        """Keepers that died are started again, without their memory."""
        for agent in self.agents:
            if not alive(agent.pid):
                agent.respawn()

    def _seal(self) -> None:
        for agent in self.agents:
            if alive(agent.pid):
                try:
                    agent.link.settle(self.attempt, 3.0)
                except KeeperGone:
                    continue
        self.seals = [f.name for f in catalogue.listing(self.storage) if f.committed]

    def _candidates(self) -> list[Candidate]:
        memory: dict[tuple[int, int], dict[int, str]] = {}
        for agent in self.agents:
            for h in agent.link.inventory():
                memory.setdefault((h.attempt, h.step), {})[h.rank] = agent.node
        marks = {m for m, held in memory.items() if len(held) == self.world}
        on_disk = {(f.attempt, f.step) for f in catalogue.listing(self.storage) if f.name in self.seals}
        return [
            Candidate(a, s, folder_name(s, a), memory.get((a, s), {}), (a, s) in on_disk)
            for a, s in sorted(marks | on_disk, reverse=True)
        ]

    def _said(self, attempt: int, rank: int) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "said" / f"{attempt:05d}-{rank}").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(x) for x in lines if x.endswith("}")]

    def _check_agreement(self, candidates: list[Candidate]) -> None:
        heard = [self._said(self.attempt, r)[0] for r in range(self.world)]
        assert all(h["right"] for h in heard), f"attempt {self.attempt}: wrong bytes were restored: {heard}"
        chosen = {(h["attempt"], h["restored"]) for h in heard}
        assert len(chosen) == 1, f"attempt {self.attempt}: the ranks disagree: {heard}"
        (mark,) = chosen
        sound = [
            (c.attempt, c.step)
            for c in candidates
            if len(c.memory) == self.world or (c.on_disk and c.name not in self.damaged)
        ]
        # A damaged one may still do: where the share of each rank is in memory or in a file that is not damaged.
        least = sound[0] if sound else (0, 0)
        assert mark >= least, f"attempt {self.attempt}: took {mark}, the newest sound one is {least}"

    def _check_disk(self) -> None:
        for r in range(self.world):
            for line in self._said(self.attempt, r):
                if "durable" in line:
                    self.announced.add((line["attempt"], line["durable"]))
        good = set()
        for f in catalogue.listing(self.storage):
            if f.committed and f.name not in self.damaged:
                result = catalogue.verify_in(self.storage, f.name)
                assert result.ok, f"{f.name} passes as whole and is not: {result.problems}"
                good.add((f.attempt, f.step))
        lost = {m for m in self.announced if folder_name(m[1], m[0]) not in self.damaged} - good
        assert not lost, f"announced as durable and not there: {lost}"
        # Old ones go, so that a fault-injection test does not read everything every time.
        for attempt, step in sorted(good)[:-6]:
            self.storage.delete_folder(folder_name(step, attempt))
            self.announced.discard((attempt, step))
        self.announced = {m for m in self.announced if m in good}
        self.seals = [
            n for n in self.seals if n in {folder_name(s, a) for a, s in sorted(good)[-6:]} | self.damaged
        ]

    def _damage(self) -> None:
        """Flips a bit in, cuts, or removes a file of a recent checkpoint."""
        folders = sorted((self.folder / "checkpoints").glob("step-*"))[-3:]
        if not folders:
            return
        folder = self.random.choice(folders)
        files = sorted(p for p in folder.iterdir() if p.is_file() and p.stat().st_size)
        if not files:
            return
        path, how = self.random.choice(files), self.random.choice(["flip", "cut", "remove"])
        self.strikes[how] += 1
        self.damaged.add(folder.name)
        data = bytearray(path.read_bytes())
        if how == "flip":
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            path.write_bytes(data)
        elif how == "cut":
            path.write_bytes(data[: self.random.randrange(len(data))])
        else:
            path.unlink()


def main() -> int:
    """Runs the campaign of the command line; 0 if everything held."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rounds", type=int, default=500)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--local", type=int, default=2, help="ranks on each node")
    p.add_argument("--megabytes", type=float, default=SIZE, help="of each rank's state; 40: several chunks")
    p.add_argument("--folder", type=Path, help="kept for a look afterwards; default: a temporary one")
    p.add_argument("--out", type=Path, help="JSON with the counts")
    a = p.parse_args()
    folder = a.folder or Path(tempfile.mkdtemp(prefix="unbroken-campaign-"))
    fault_injection = FaultInjection(folder, a.seed, a.nodes, a.local, a.megabytes)
    began = time.monotonic()
    try:
        for i in range(a.rounds):
            fault_injection.round()
            if (i + 1) % 10 == 0 or i + 1 == a.rounds:
                print(
                    f"{i + 1} rounds, {time.monotonic() - began:.0f} s: {dict(fault_injection.strikes)}",
                    flush=True,
                )
    finally:
        fault_injection.close()
        if a.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    result = {
        "rounds": a.rounds, "seed": a.seed, "megabytes": a.megabytes, "strikes": dict(fault_injection.strikes), "seconds": round(time.monotonic() - began, 1),
        "held": True,
    }  # fmt: skip
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
