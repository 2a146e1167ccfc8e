"""Virtual nodes on this machine, as a cluster of events: `node-000`, `node-001`, ... for one run.

The kernel tells when an agent ends (a pidfd each), also of agents that an earlier supervisor started. What holds the
processes of a node, and proves that none is left, is an `Ownership` (cgroup, parent or marks), as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import atomic
from ..errors import RunError, UnknownKey
from ..link.address import check_socket
from ..link.secret import as_input
from ..machine import python_path
from ..private import private_folder
from .at_once import fence_all
from .clocks import Moment
from .contract import (
    AgentCommand,
    Allocation,
    Cordon,
    Event,
    Exited,
    Fenced,
    Lost,
    Request,
    Returned,
    Started,
)
from .holding.choice import choose, every
from .holding.ownership import EndedProcesses, Kind, Ownership
from .holding.processes import marked, read_stat
from .local import check_fits, check_scratch, find_root, name_node, open_log
from .local_folder import RECORD
from .stream import EventStream

_FIND_S = 30.0
_TOGETHER_S = 0.2
"""Processes of a node that end within so much have ended together: then the node was lost, and not its agent alone."""


@dataclass(frozen=True)
class _Agent:
    """A running agent: `process` where this supervisor started it and the kernel tells us how it ended."""

    node: str
    launch: str
    pidfd: int
    process: subprocess.Popen[bytes] | None


@dataclass(frozen=True)
class LocalOptions:
    """What may be asked of virtual nodes."""

    ownership: str = "auto"
    """How processes are held: cgroup, parent, marks; auto takes the surest that works."""

    def __post_init__(self) -> None:
        if self.ownership not in ("auto", *Kind):
            raise UnknownKey(self.ownership, ["auto", *Kind], what="way to hold processes")


class LocalCluster:
    """Virtual nodes of one run. `log_of` says where the output of a node's agent goes; nowhere by default."""

    Options = LocalOptions
    only: str | None = None
    """The one node that is here, where not all are."""

    def __init__(
        self,
        run_id: str,
        options: LocalOptions = LocalOptions(),
        *,
        log_of: Callable[[str], Path] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_id = run_id
        self._log_of, self._clock = log_of, clock
        self._root = find_root(run_id)
        self._before = every(run_id, self._root)
        self._wanted = None if options.ownership == "auto" else Kind(options.ownership)
        self._agents: dict[str, _Agent] = {}
        """By launch."""
        self._parents: list[subprocess.Popen[bytes]] = []
        self._found_running = False
        self._fencing: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stream = EventStream(self._running)

    @functools.cached_property
    def _chosen(self) -> tuple[Ownership, str]:
        return choose(self.run_id, self._root, self._wanted)

    @property
    def owner(self) -> Ownership:
        """How the processes of this run are held. Raises RunError where the wanted way does not work."""
        return self._chosen[0]

    @property
    def socket_folder(self) -> Path | None:
        return self._root

    @property
    def door_address(self) -> str:
        return ""

    def describe(self) -> str:
        return f"virtual nodes on this machine; processes are held by {self.describe_holding()}"

    def describe_holding(self) -> str:
        """How the processes of the run are held, in words, and why in no surer way. Raises RunError where the wanted way
        does not work."""
        owner, why_not_surer = self._chosen
        held = owner.describe()
        return f"{held} ({why_not_surer})" if why_not_surer else held

    # --- nodes

    def check(self, request: Request) -> None:
        if (
            len(self._given()) < request.nodes + request.spares
        ):  # else its own ranks may be what fills the memory
            check_fits(request.nodes, request.ranks_per_node, request.spares)
        check_scratch(self._root)
        # The longest of the paths that sockets have here.
        check_socket(self._root / name_node(request.nodes + request.spares - 1) / "keeper.sock", "TMPDIR")

    async def acquire(self, request: Request) -> Allocation:
        """Names of virtual nodes, at once. Raises DoesNotFit where their ranks would not fit on this machine."""
        given, cordoned = self._given(), set(await self.cordons())
        out = cordoned | set(request.exclude) | set(request.replaces)
        wanted = request.nodes + request.spares
        taken = [] if request.replaces else [n for n in given if n not in out][:wanted]
        names = (name_node(i) for i in range(len(given) + len(out) + wanted))
        fresh = [n for n in names if n not in out and n not in given][: wanted - len(taken)]
        if fresh and not request.replaces:
            check_fits(request.nodes, request.ranks_per_node, request.spares)
        taken += fresh
        self._write(given=[*(n for n in given if n not in request.replaces), *fresh])
        return Allocation(
            f"local-{self.run_id}", tuple(taken[: request.nodes]), tuple(taken[request.nodes :])
        )

    async def give_back(self, nodes: Collection[str]) -> None:
        given = self._given()
        proven, error = await fence_all(self.fence, [n for n in given if n in nodes])
        self._write(given=[n for n in self._given() if n not in proven])
        if error is not None:
            raise error

    # --- agents

    async def start(self, node: str, command: AgentCommand) -> str:
        if node not in self._given():
            raise RunError("the node is none of this run's", where=node, hint="Ask for nodes first")
        try:
            agent = await asyncio.to_thread(self._launch, node, command)
        except OSError as e:
            raise RunError(f"the agent cannot be started: {e.strerror or e}", where=node) from e
        self._agents[agent.launch] = agent
        self._stream.publish(Started(self._now(), node, agent.launch))
        self._follow(agent)
        return agent.launch

    def _launch(self, node: str, command: AgentCommand) -> _Agent:
        owner = self.owner
        private_folder(self._root)  # in a place where others may make folders too
        argv = [
            sys.executable, "-m", command.module, *command.arguments,
            "--ownership", owner.as_text(), "--scratch", str(self._root / node),
        ]  # fmt: skip
        for other in self._others():
            argv += ["--held-before", other.as_text()]
        marks = {"UNBROKEN_RUN_ID": self.run_id, "UNBROKEN_NODE": node, "UNBROKEN_ROLE": "agent"}
        if not _importable():
            marks["PYTHONPATH"] = python_path()  # the ranks inherit it: they could not import us either
        start = owner.start_agent(node, argv)
        try:
            log = self._log_of(node) if self._log_of is not None else None
            with open_log(log) as out, as_input(command.secret) as secret:
                process = subprocess.Popen(
                    start.argv,
                    env={**os.environ, **command.environment, **marks, **start.env},
                    cwd="/",
                    stdin=secret,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    preexec_fn=start.enter,
                )
        except subprocess.SubprocessError as e:
            raise OSError(errno.EIO, f"it could not be put where it is held: {e}") from e
        finally:
            start.close()
        if owner.kind is not Kind.PARENT:
            return _Agent(node, _name(node, process.pid), os.pidfd_open(process.pid), process)
        self._parents = [p for p in self._parents if p.poll() is None]
        self._parents.append(process)
        pid = _wait_for_agent(process)
        # The small parent reaps its agent: when it ended is known here, how is not.
        with contextlib.suppress(OSError):
            if pid is not None:
                return _Agent(node, _name(node, pid), os.pidfd_open(pid), None)
        return _Agent(node, f"{node}/{process.pid}-ended", os.eventfd(1), None)

    def _follow(self, agent: _Agent) -> None:
        asyncio.get_running_loop().add_reader(agent.pidfd, self._ended, agent)

    def _ended(self, agent: _Agent) -> None:
        self._let_go(agent)
        # The pidfd is readable a moment before a child can be waited for by another thread; this one waits itself.
        code = agent.process.wait() if agent.process is not None else None
        how = (None, None) if code is None else (code, None) if code >= 0 else (None, -code)
        exited = Exited(self._now(), agent.node, agent.launch, *how)
        if code == 0 or agent.node in self._fencing:
            self._stream.publish(exited)
            return
        task = asyncio.get_running_loop().create_task(self._miss(exited))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _miss(self, exited: Exited) -> None:
        """Reports that an agent ended, and its node as lost where keeper and ranks are gone too: its memory is.

        Both at once, so that nobody has to guess for how long the second is to be waited for. A virtual node returns
        in the same moment.
        """
        node = exited.node
        await asyncio.sleep(_TOGETHER_S)
        left = await asyncio.to_thread(self.owner.left, node)
        self._stream.publish(exited)
        if left or node in self._fencing or any(a.node == node for a in self._agents.values()):
            return
        proven = self.owner.kind is not Kind.MARKS
        at = Moment(exited.at.earliest, self._clock())
        self._stream.publish(Lost(at, node, "its agent, its keeper and its ranks are gone", proven))
        self._stream.publish(Returned(self._now(), node))

    def _let_go(self, agent: _Agent) -> None:
        asyncio.get_running_loop().remove_reader(agent.pidfd)
        os.close(agent.pidfd)
        self._agents.pop(agent.launch, None)

    # --- events

    def events(self) -> AsyncIterator[Event]:
        if not self._found_running:
            self._found_running = True
            self._find_running()
        return self._stream.read()

    def launches(self) -> list[str]:
        """The agents that run now."""
        return list(self._agents)

    def _running(self) -> list[Event]:
        return [Started(self._now(), a.node, a.launch) for a in self._agents.values()]

    def _find_running(self) -> None:
        """Takes over the agents that an earlier supervisor started."""
        for p in marked(self.run_id, node=self.only):
            launch = f"{p.node}/{p.pid}-{p.started}"
            if p.role != "agent" or launch in self._agents:
                continue
            with contextlib.suppress(OSError):  # it ended meanwhile
                agent = _Agent(p.node, launch, os.pidfd_open(p.pid), None)
                self._agents[launch] = agent
                self._follow(agent)

    def _now(self) -> Moment:
        return Moment.at(self._clock())

    # --- fences

    async def fence(self, node: str, deadline_s: float) -> Fenced:
        self._fencing[node] = self._fencing.get(node, 0) + 1
        try:
            return await self._fence(node, deadline_s)
        finally:
            # What ends by the fence is heard of a moment later.
            asyncio.get_running_loop().call_later(2 * _TOGETHER_S, self._fenced, node)

    def _fenced(self, node: str) -> None:
        self._fencing[node] -= 1
        if not self._fencing[node]:
            del self._fencing[node]

    async def _fence(self, node: str, deadline_s: float) -> Fenced:
        found = await asyncio.to_thread(describe_agent, self.run_id, node)
        ending = asyncio.ensure_future(asyncio.to_thread(self.end_node, node, max(0.0, deadline_s)))
        # A look at /proc can hang with a disk: whoever asked gets an answer all the same.
        done, _ = await asyncio.wait({ending}, timeout=max(0.0, deadline_s) + 1.0)
        if not done:
            return Fenced(False, f"its processes were not ended within {deadline_s:g} s", found=found)
        ended = ending.result()
        why = ended.why
        if ended.survivors:
            why = f"processes {list(ended.survivors)} survive kill -9" + (f"; {why}" if why else "")
        return Fenced(ended.gone, why, tuple(str(p) for p in ended.survivors), found)

    async def forget(self, node: str) -> None:
        await asyncio.to_thread(self.forget_node, node)

    def forget_node(self, node: str) -> None:
        """Drops what is remembered of a lost proof; blocks meanwhile."""
        for owner in (*self._others(), self.owner):
            owner.forget(node)

    def end_all(self) -> EndedProcesses:
        """Ends the run's processes on every node of which something is left here; blocks meanwhile."""
        ended = EndedProcesses()
        for owner in (*self._others(), self.owner):
            for node in owner.nodes():
                ended |= owner.end_node(node)
        return ended

    def end_node(self, node: str, within: float = 10.0) -> EndedProcesses:
        """Ends all that the run has on a node, and frees its folder, where nothing survived; blocks meanwhile."""
        deadline = time.monotonic() + within
        ended = EndedProcesses()
        # What another way holds goes first: the marks that this one looks for would hit what holds it.
        for owner in (*self._others(), self.owner):
            ended |= owner.end_node(node, within=max(0.05, deadline - time.monotonic()))
        if not ended.survivors:
            shutil.rmtree(self._root / node, ignore_errors=True)
        return ended

    def _others(self) -> list[Ownership]:
        """How an earlier supervisor held processes of this run, where that was another way."""
        mine = self.owner.as_text()
        return [o for o in self._before if o.as_text() != mine]

    # --- cordons, and what a successor has to know

    async def cordon(self, cordon: Cordon) -> None:
        held = await self.cordons()
        if (other := held.get(cordon.node)) is not None and other.owner != cordon.owner:
            raise RunError(f"it is cordoned by {other.owner} ({other.reason})", where=cordon.node)
        self._write(cordons={**held, cordon.node: cordon})

    async def release(self, node: str, owner: str) -> None:
        held = await self.cordons()
        if node in held and held[node].owner != owner:
            raise RunError(
                f"it was cordoned by {held[node].owner}, not by {owner}", where=node,
                hint=f"Ask {held[node].owner}: {held[node].reason}",
            )  # fmt: skip
        self._write(cordons={n: c for n, c in held.items() if n != node})

    async def cordons(self) -> Mapping[str, Cordon]:
        now = time.time()
        found = [Cordon(**c) for c in self._read().get("cordons", [])]
        return {c.node: c for c in found if not c.has_expired(now)}

    def _given(self) -> list[str]:
        return list(self._read().get("given", []))

    @property
    def _record(self) -> Path:
        return self._root / RECORD

    def _read(self) -> dict[str, list]:
        try:
            found: dict[str, list] = json.loads(self._record.read_text())
            return found
        except FileNotFoundError:
            return {}

    def _write(
        self, *, given: Collection[str] | None = None, cordons: Mapping[str, Cordon] | None = None
    ) -> None:
        value = self._read()
        if given is not None:
            value["given"] = list(given)
        if cordons is not None:
            value["cordons"] = [asdict(c) for c in cordons.values()]
        if any(value.values()):
            private_folder(self._root)
            atomic.write_json(self._record, value, durable=False)
            return
        self._record.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._root.rmdir()  # something of the run is still there

    async def close(self) -> None:
        for agent in list(self._agents.values()):
            self._let_go(agent)
        for task in self._tasks:
            task.cancel()
        self._stream.close()


def describe_agent(run_id: str, node: str) -> str:
    """What a node's agent is doing, in words; "" where there is none."""
    agent = next((p for p in marked(run_id, node=node) if p.role == "agent"), None)
    if agent is None:
        return ""
    words = {
        "T": "is stopped by a signal",
        "t": "is held by a debugger",
        "D": "waits for a device or a disk",
    }
    return f"its agent (process {agent.pid}) {words.get(agent.state, 'is there, but hardly runs')}"


def _name(node: str, pid: int) -> str:
    """A launch's name: the process itself, so that a successor finds the same one."""
    with contextlib.suppress(OSError, ValueError):
        return f"{node}/{pid}-{read_stat(pid)[1]}"
    return f"{node}/{pid}-0"


def _wait_for_agent(parent: subprocess.Popen[bytes]) -> int | None:
    """The agent that a small parent has started, as soon as it is there; None where it has ended already.

    Raises OSError where it does not come up in time.
    """
    deadline = time.monotonic() + _FIND_S
    while time.monotonic() < deadline:
        if parent.poll() is not None:
            return None  # it ends when all that it held has ended
        roles = {}
        with contextlib.suppress(OSError, ValueError):
            for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split():
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                # In the midst of its exec a process shows none at all: it is still the parent's child that becomes the agent.
                unknown = b"" if any(environ) else b"parent"
                roles[int(pid)] = next((v[14:] for v in environ if v.startswith(b"UNBROKEN_ROLE=")), unknown)
        found = next((pid for pid, role in roles.items() if role == b"agent"), None)
        if found is not None:
            return found
        if roles and b"parent" not in roles.values():
            return None  # there are only others left, which it had started
        time.sleep(0.002)
    parent.kill()
    raise OSError(errno.ETIMEDOUT, f"it did not come up within {_FIND_S:g} s")


@functools.cache
def _importable() -> bool:
    """Whether a bare interpreter finds this package and what it needs: not where they came from sys.path alone."""
    code = "from importlib.util import find_spec\nimport sys\nsys.exit(any(find_spec(m) is None for m in ('unbroken', 'psutil')))"
    return subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0
