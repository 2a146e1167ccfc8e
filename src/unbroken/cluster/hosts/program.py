"""What runs on a host while a supervisor is connected to it over ssh: `python -m unbroken.cluster.hosts.program RUN NODE`.

It reads orders from standard input and answers on standard output, a line of JSON each, and reports what becomes of the
node's agent. The agent outlives it: it is held by what `LocalCluster` holds processes with, and another program finds it.
What has to be known of the host by whoever connects next (which runs were given it, who cordoned it) lies in
`$XDG_STATE_HOME/unbroken/hosts/NODE.json` there.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import atomic
from ...errors import RunError, UnbrokenError
from ...journal.codec import encode
from ...machine import usable_cpus
from ...progress import RunDir
from ...version import __version__
from ..contract import AgentCommand, Cordon, Event
from ..holding.processes import find_runs
from ..local import find_root
from ..local_events import LocalCluster, LocalOptions
from ..survey import read_boot_id

Message = dict[str, Any]
LINE_BYTES = 1 << 20


class Notes:
    """What is remembered of this host between connections: `given` to which runs, and the `cordon`, if any."""

    def __init__(self, node: str) -> None:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self._path = Path(state) / "unbroken" / "hosts" / f"{node}.json"

    def read(self) -> Message:
        try:
            found: Message = json.loads(self._path.read_text())
        except FileNotFoundError:
            found = {}
        except (OSError, ValueError) as e:
            raise RunError(f"what is noted of the host cannot be read: {e}", where=str(self._path)) from e
        cordon = found.get("cordon")
        if cordon and Cordon(**cordon).has_expired(time.time()):
            cordon = None
        return {"given": list(found.get("given", [])), "cordon": cordon}

    def change(self, change: Callable[[Message], None]) -> None:
        """Changes them as one, whoever else does meanwhile. Raises RunError."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                notes = self.read()
                change(notes)
                atomic.write_json(self._path, notes)
        except OSError as e:
            raise RunError(f"nothing can be noted of the host: {e.strerror}", where=str(self._path)) from e

    def cordon(self, cordon: Cordon) -> None:
        def change(notes: Message) -> None:
            _check_owner(notes, cordon.node, cordon.owner)
            notes["cordon"] = asdict(cordon)

        self.change(change)

    def release(self, node: str, owner: str) -> None:
        def change(notes: Message) -> None:
            _check_owner(notes, node, owner)
            notes["cordon"] = None

        self.change(change)

    def give(self, run_id: str, given: bool) -> None:
        def change(notes: Message) -> None:
            notes["given"] = [r for r in notes["given"] if r != run_id] + ([run_id] if given else [])

        self.change(change)


def _check_owner(notes: Message, node: str, owner: str) -> None:
    held = notes["cordon"]
    if held and held["owner"] != owner:
        raise RunError(f"it is cordoned by {held['owner']} ({held['reason']}), not by {owner}", where=node,
                       hint=f"Ask {held['owner']}")  # fmt: skip


class OneNode(LocalCluster):
    """This machine as one node of a run."""

    def __init__(self, run_id: str, node: str, ownership: str) -> None:
        own = RunDir(find_root(run_id) / node / "run")  # from where the agent sends it
        super().__init__(run_id, LocalOptions(ownership), log_of=own.agent_log)
        self.only = node

    def _given(self) -> list[str]:
        return [self.only] if self.only else []


class Program:
    """Answers orders for one node."""

    def __init__(self, run_id: str, node: str, cluster: OneNode, send: Callable[[Message], None]) -> None:
        self._run_id, self._node, self._send = run_id, node, send
        self._cluster = cluster
        self._notes = Notes(node)

    async def report(self) -> None:
        """Says what the host is, and then all that happens there."""
        events = self._cluster.events()
        self._send(await self._describe_host())
        async for event in events:
            self._send({"event": type(event).__name__, **_describe(event)})

    async def _describe_host(self) -> Message:
        notes = self._notes.read()
        return {
            "unbroken": __version__, "boot": read_boot_id(), "given": self._run_id in notes["given"],
            "cordon": notes["cordon"], "running": self._cluster.launches(), "holding": self._cluster.describe_holding(),
            "cpus": usable_cpus(), "others": sorted(find_runs(self._node) - {self._run_id}),
        }  # fmt: skip

    async def carry_out(self, message: Message) -> None:
        """Carries out one order and answers it."""
        number = message.get("id")
        try:
            answer = await self._do(message)
            self._send({"answer": number, "ok": True, **answer})
        except UnbrokenError as e:
            self._send({"answer": number, "ok": False, "what": e.message, "where": e.where, "hint": e.hint})
        except (OSError, ValueError, KeyError, TypeError) as e:
            self._send({"answer": number, "ok": False, "what": f"{type(e).__name__}: {e}"})

    async def _do(self, m: Message) -> Message:
        match m.get("op"):
            case "start":
                command = AgentCommand(
                    m["module"], tuple(m["arguments"]), m["environment"], base64.b64decode(m["secret"])
                )
                return {"launch": await self._cluster.start(self._node, command)}
            case "fence":
                return {"fenced": encode(await self._cluster.fence(self._node, float(m["deadline_s"])))}
            case "forget":
                await self._cluster.forget(self._node)
            case "give":
                await asyncio.to_thread(self._notes.give, self._run_id, m["given"])
            case "cordon":
                await asyncio.to_thread(self._notes.cordon, Cordon(**m["cordon"]))
            case "release":
                await asyncio.to_thread(self._notes.release, self._node, m["owner"])
            case "notes":
                return await asyncio.to_thread(self._notes.read)
            case "others":
                return {"others": sorted(await asyncio.to_thread(find_runs, self._node) - {self._run_id})}
            case op:
                raise RunError(f"there is no order '{op}'", where=self._node)
        return {}

    async def close(self) -> None:
        await self._cluster.close()


def _describe(event: Event) -> Message:
    """The event's fields; how long ago it was instead of a time of this host's clock."""
    fields: Message = encode(event)
    fields.pop("at"), fields.pop("node", None)
    return {"ago": max(0.0, time.monotonic() - event.at.earliest), **fields}


async def serve(make: Callable[[Callable[[Message], None]], Program]) -> None:
    """Until standard input ends: whoever gave orders is gone then, and what runs goes on. `make` is given what sends a line.

    Raises what keeps the program from reporting: one that is silent and stays would be waited for.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb"))
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what anything else prints is no answer

    def send(message: Message) -> None:
        out.write(json.dumps(message).encode() + b"\n")

    program = make(send)
    tasks: set[asyncio.Task[None]] = set()

    async def obey() -> None:
        while line := await reader.readline():
            tasks.add(task := asyncio.create_task(program.carry_out(json.loads(line))))
            task.add_done_callback(tasks.discard)

    tasks |= {
        reporting := asyncio.create_task(program.report()),
        obeying := asyncio.create_task(obey()),
    }
    try:
        await asyncio.wait({reporting, obeying}, return_when=asyncio.FIRST_COMPLETED)
        if reporting.done():
            reporting.result()
        await obeying
    except (ValueError, BrokenPipeError):
        pass
    finally:
        for task in list(tasks):
            task.cancel()
        await program.close()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m unbroken.cluster.hosts.program", description=__doc__)
    parser.add_argument("run_id")
    parser.add_argument("node")
    parser.add_argument("--ownership", default="auto")
    args = parser.parse_args()
    try:
        node = OneNode(args.run_id, args.node, args.ownership)
        asyncio.run(serve(lambda send: Program(args.run_id, args.node, node, send)))
    except (UnbrokenError, OSError) as e:
        sys.exit(" ".join(str(e).split()))


if __name__ == "__main__":
    main()
