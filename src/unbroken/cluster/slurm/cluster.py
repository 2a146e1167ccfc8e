"""The nodes of a Slurm job as a cluster: `unbroken run --cluster slurm` inside an allocation.

One step for the agent and keeper of each node, which shares what the job has (`--overlap`) and takes no GPU. A node that is lost
leaves the job, which goes on where it was submitted with --no-kill; a spare of the same job takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import DoesNotFit, RunError, UsageError
from ...machine import python_path
from ...units import plural
from ..at_once import FENCES_AT_ONCE, GIVEN_BACK_S, for_each
from ..contract import AgentCommand, Allocation, Cordon, Event, Fenced, Request
from ..holding.apart import Container
from ..local_events import _importable
from ..stream import EventStream
from ..survey import find_address
from .command_lines import StepOrder, node_program, srun, srun_from_node
from .controller.commands import NEEDED, NoAnswer, Slurm, SlurmRefused, find_missing, is_contained
from .controller.draining import Draining, Nodes, NoRight, check_owner
from .controller.records import KILL_FAILED, JobRecord, NodeRecord
from .jobs.batch import find_excluded
from .jobs.submission import Submission, find_preemption_risk, rebuild_arguments
from .launches import Launches, name_other
from .memory import Memory, NodeFacts
from .options import SlurmOptions
from .survey import find_trouble, read_surveys
from .watching import NodeView, SlurmWatching

_log = logging.getLogger("unbroken.slurm")
_SURVEY_S = 120.0
_PAUSE_S = 0.1
_RANKS_PER_CPU = 64


class SlurmCluster:
    """One run inside one job. `log_of` says where the output of a node's agent goes."""

    Options = SlurmOptions

    def __init__(
        self,
        run_id: str,
        options: SlurmOptions = SlurmOptions(),
        *,
        log_of: Callable[[str], Path] | None = None,
        clock: Callable[[], float] = time.monotonic,
        slurm: Slurm | None = None,
    ) -> None:
        self.run_id, self._options, self._log_of = run_id, options, log_of
        self.job = options.job or os.environ.get("SLURM_JOB_ID", "")
        self._slurm = slurm or Slurm()
        self._launches = Launches(run_id)
        self._memory = Memory(self._launches.folder, self.job)
        self._contained: bool | None = None
        self._stream = EventStream(lambda: self._watching.list_running())
        self._watching = SlurmWatching(
            self.job, self._slurm, self._launches, self._stream, every_s=float(options.poll), clock=clock
        )  # fmt: skip
        self._starting: dict[str, asyncio.Future[str]] = {}
        self._draining = Draining(self._slurm)

    @staticmethod
    def plan_submission(
        options: SlurmOptions, request: Request, arguments: Sequence[str], run_dir: Path
    ) -> Submission | None:
        """How `unbroken run` with these arguments is submitted as a job; None inside an allocation. Raises UsageError."""
        if options.job or os.environ.get("SLURM_JOB_ID"):
            return None
        folder = run_dir.absolute()
        planned = Submission(
            options, replace(request, exclude=frozenset(find_excluded(folder))), rebuild_arguments(arguments, folder),
            f"unbroken-{folder.name}", folder.with_name(f"{folder.name}.slurm.log"), folder, Path.cwd(),
        )  # fmt: skip
        planned.check()
        return planned

    @staticmethod
    def open_nodes(options: SlurmOptions) -> Nodes:
        """The nodes of the site, for `unbroken nodes`."""
        return Nodes(Slurm())

    @property
    def socket_folder(self) -> Path | None:
        return None

    @property
    def door_address(self) -> str:
        """The address of the interface that was asked for; "" where none was. Raises UsageError for one that is not there."""
        if not self._options.interface:
            return ""
        return find_address(self._options.interface)

    def describe(self) -> str:
        how = "" if self._options.interface == "" else f", reached by {self._options.interface}"
        image = f", in {self._options.image} ({self._options.runtime})" if self._options.image else ""
        return f"job {self.job} of Slurm: a step for each node's agent and keeper{image}{how}"

    def check(self, request: Request) -> None:
        """Raises UsageError or RunError where there is no Slurm here, or no allocation."""
        if missing := find_missing():
            raise UsageError(
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not on the PATH: this host has no Slurm",
                hint=f"Run it where {', '.join(NEEDED)} are, or leave --cluster slurm out",
            )
        if not self.job:
            raise UsageError(
                "this is no allocation of Slurm: SLURM_JOB_ID is not set",
                hint="Give --cluster slurm to unbroken run, which submits itself, or name a job: --cluster slurm,job=ID",
            )
        self.door_address  # noqa: B018  it raises

    # --- nodes

    async def acquire(self, request: Request) -> Allocation:
        """Nodes of the job, at once: a job is given its nodes before it starts.

        Raises DoesNotFit where it has too few that can be used, RunError where the job is over, and what the survey of the
        nodes finds wrong with them.
        """
        job = await self._find_job()
        out = {*await self.cordons(), *request.exclude, *request.replaces}
        nodes = await self._slurm.list_nodes(job.nodes)  # now: an expired cordon was lifted
        usable = [n for n in job.nodes if n not in out and self._can_use(n, nodes.get(n))]
        self._check_size(request, nodes)
        given, wanted = self._memory.given, request.nodes + request.spares
        held = [] if request.replaces else [n for n in given if n in usable][:wanted]
        fresh = [n for n in usable if n not in given][: wanted - len(held)]
        found = [*held, *fresh]
        # A run that goes on may have used its spares up; one that begins gets what it asked for.
        least = request.nodes if given else wanted
        if len(found) < least:
            raise self._too_few(request, job, nodes, usable, out)
        notes = () if given or request.replaces else await self._list_notes()
        facts = await self._survey(fresh)
        self._memory.give([*(n for n in given if n not in request.replaces), *fresh])
        self._memory.learn(facts)
        for node in found:
            self._watching.watched.setdefault(node, NodeView())
        return Allocation(
            self.job, tuple(found[: request.nodes]), tuple(found[request.nodes :]),
            self._watching.convert_end(job.ends), notes,
        )  # fmt: skip

    async def _list_notes(self) -> tuple[str, ...]:
        """What a run that begins should know of this job. Raises RunError where cordons are to be drains, and cannot be."""
        risk = await find_preemption_risk(self._slurm, self.job, float(self._options.poll))
        lack = await self._draining.find_lack_of_right() if self._options.cordon != "own" else ""
        if lack and self._options.cordon == "drain":
            raise RunError(
                f"nodes that the run convicts cannot be drained: {lack}", where=f"job {self.job}",
                hint="Ask an operator of the cluster for the right, or leave cordon=drain out: the run keeps a list of its own",
            )  # fmt: skip
        note = (
            f"nodes that the run convicts are kept out of this run alone, and not drained: {lack}. "
            "An operator can drain them: unbroken nodes cordon NODE"
        )  # fmt: skip
        return tuple(n for n in (risk, note if lack else "", await self._describe_first_node()) if n)

    async def _describe_first_node(self) -> str:
        """What it means that the supervisor runs in the job's batch script; "" where it does not."""
        if os.environ.get("SLURM_JOB_ID") != self.job:
            return ""
        host = ""
        with contextlib.suppress(RunError):
            host = (await self._slurm.read_queue(self.job)).batch_host
        return host and (
            f"the run is supervised on {host}, in the job's batch script. Where its daemon is lost Slurm requeues the job (--requeue); where an "
            f"operator sets {host} down the job ends, and the `unbroken run` that submitted it has it requeued, if it is still there; "
            "else the same command goes on in another job"
        )

    async def _find_job(self) -> JobRecord:
        job = await self._slurm.find_job(self.job)
        if job is None or not job.runs:
            state = "is over" if job is None else f"is {job.state.lower()}"
            raise RunError(
                f"the job {state}", where=f"job {self.job}", hint="Submit it again: the run goes on"
            )
        return job

    def _can_use(self, name: str, node: NodeRecord | None) -> bool:
        view = self._watching.watched.get(name)
        return node is not None and node.responds and not node.down and not (view and view.lost)

    def _check_size(self, request: Request, nodes: Mapping[str, NodeRecord]) -> None:
        if request.ranks_per_node > _RANKS_PER_CPU * max((n.cpus for n in nodes.values()), default=1):
            cpus = max((n.cpus for n in nodes.values()), default=0)
            raise DoesNotFit(
                f"{plural(request.ranks_per_node, 'rank')} on nodes of {plural(cpus, 'processor')} would not train but wait",
                where=f"job {self.job}", hint="Use fewer --nproc",
            )  # fmt: skip

    def _too_few(
        self,
        request: Request,
        job: JobRecord,
        nodes: Mapping[str, NodeRecord],
        usable: Sequence[str],
        out: set[str],
    ) -> DoesNotFit:
        wanted = plural(request.nodes, "node") + (
            f" and {plural(request.spares, 'spare')}" if request.spares else ""
        )
        unusable = [n for n in job.nodes if n not in usable]
        whys = [
            f"{n}: {nodes[n].describe() if n not in out else 'out of use'}" for n in unusable if n in nodes
        ]
        left = [n for n in usable if n not in self._memory.given] if request.replaces else usable
        more = f" ({'; '.join(whys[:4])})" if whys else ""
        if request.replaces:
            return DoesNotFit(
                f"no node of the job is left to replace {', '.join(request.replaces)}{more}", where=f"job {self.job}",
                hint="Submit with more nodes (sbatch -N) and more --spares",
            )  # fmt: skip
        total = request.nodes + request.spares
        return DoesNotFit(
            f"the job has {plural(len(left), 'node')} that can be used, the run asks for {wanted}{more}", where=f"job {self.job}",
            hint=f"Submit it with sbatch -N {total} --no-kill, or ask for fewer --nodes or --spares",
        )  # fmt: skip

    async def _survey(self, nodes: Sequence[str]) -> dict[str, NodeFacts]:
        """Asks nodes what they are before anything starts there. Raises what is wrong with them."""
        if not nodes:
            return {}
        order = StepOrder(
            self.job, tuple(nodes), name_other(self.run_id, "survey"), gpus=True, immediate_s=60
        )
        program = node_program(self._options, "survey", "--run-id", self.run_id)
        said = ""
        try:
            out = await self._slurm.call(
                *srun(order, self._options, program), within_s=_SURVEY_S, env=self._environment
            )
        except SlurmRefused as e:
            out, said = e.printed, e.said
        surveys = read_surveys(out)
        trouble = find_trouble(
            nodes, surveys, gpus=self._options.gpus, said=said or out, image=self._options.image
        )
        if trouble is not None:
            raise trouble
        return {n: NodeFacts(surveys[n].visible, surveys[n].srun) for n in nodes}

    async def give_back(self, nodes: Collection[str]) -> None:
        """Ends what is left there. The job keeps them until it ends: Slurm takes no node back before."""
        given = self._memory.given
        fenced = await for_each(
            [n for n in given if n in nodes], lambda n: self.fence(n, GIVEN_BACK_S), FENCES_AT_ONCE
        )
        for node, f in fenced.items():
            if not f.proven and not self._is_lost(node):
                raise RunError(f"the node is not given back: {f.why}", where=node)
        self._memory.give([n for n in given if n not in nodes])

    # --- agents

    async def start(self, node: str, command: AgentCommand) -> str:
        if node not in self._memory.given:
            raise RunError("the node is none of this run's", where=node, hint="Ask for nodes first")
        if self._is_lost(node):
            raise RunError(f"the node is lost: {self._watching.watched[node].lost}", where=node)
        # Asking the controller takes a while: who asks meanwhile is given the same agent, and not a second one.
        starting = self._starting.get(node)
        if starting is None:
            starting = self._starting[node] = asyncio.ensure_future(self._start(node, command))
            starting.add_done_callback(lambda _: self._starting.pop(node, None))
        return await asyncio.shield(starting)

    async def _start(self, node: str, command: AgentCommand) -> str:
        # Two agents would end each other's ranks. Where this one is on its way out, its end is reported, and asked for again.
        if there := self._launches.find_running_on(node):
            return there.name
        nothing_left = await self._is_contained() and not await self._list_steps(node)
        name, step = self._launches.make_name(node)
        argv = self._make_argv(node, step, command, nothing_left)
        log = self._log_of(node) if self._log_of is not None else None
        try:
            await asyncio.to_thread(
                self._launches.spawn, name, step, node, argv, self._environment, command.secret, log
            )
        except OSError as e:
            raise RunError(f"srun cannot be started: {e.strerror or e}", where=node) from e
        return name

    def _make_argv(self, node: str, step: str, command: AgentCommand, nothing_left: bool) -> list[str]:
        facts = self._memory.facts.get(node, NodeFacts())
        environment = dict(command.environment)
        if facts.visible is not None:
            # The agent's step has no GPU of its own, and says all the same which its ranks have.
            environment["CUDA_VISIBLE_DEVICES"] = facts.visible
        ranks = StepOrder(self.job, (node,), name_other(self.run_id, "ranks"), gpus=True)
        # In an image without srun they run in the agent's step, which then takes the GPUs.
        apart = Container(
            tuple(srun_from_node(ranks, self._options)),
            tuple(
                node_program(
                    self._options, "gone", "--run-id", self.run_id, "--job", self.job, "--node", node
                )
            ),
            several=True,  # steps share what the job has: warm processes wait in the next attempt's
        )
        ranks_in = ["--ranks-in", apart.as_text()] if facts.srun else []
        program = node_program(
            self._options, "start", "--run-id", self.run_id, "--node", node, "--module", command.module,
            "--environment", json.dumps(environment), *ranks_in, *(["--nothing-left"] if nothing_left else []),
            "--", *command.arguments,
        )  # fmt: skip
        return srun(StepOrder(self.job, (node,), step, gpus=not facts.srun), self._options, program)

    @functools.cached_property
    def _environment(self) -> dict[str, str]:
        """What processes on nodes have: the supervisor's own environment, as sbatch hands it on, without this step's."""
        env = dict(self._slurm.environment)
        if not _importable():
            env["PYTHONPATH"] = python_path()
        return env

    def events(self) -> AsyncIterator[Event]:
        for node in self._memory.given:
            self._watching.watched.setdefault(node, NodeView())
        self._watching.start()
        return self._stream.read()

    def _is_lost(self, node: str) -> bool:
        return node in self._watching.watched and bool(self._watching.watched[node].lost)

    # --- fences

    async def fence(self, node: str, deadline_s: float) -> Fenced:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max(0.0, deadline_s)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._fence(node, deadline)
        except TimeoutError:
            return Fenced(False, f"what runs there was not proven to be gone within {deadline_s:g} s")
        except RunError as e:
            return Fenced(False, f"Slurm cannot say: {e.message}")

    async def _fence(self, node: str, deadline: float) -> Fenced:
        # An order that is on its way must not be carried out later.
        begun = [x for x in self._launches.live.values() if x.node == node]
        for launch in begun:
            if not launch.began:
                await asyncio.to_thread(launch.kill)
        contained = await self._is_contained()
        why = ""
        if not contained and not self._is_lost(node):
            why = await self._end_there(node, deadline)
            if why:
                return Fenced(False, why)
        killed: set[str] = set()
        while steps := await self._list_steps(node):
            if new := [s for s in steps if s not in killed]:
                record = (await self._slurm.list_nodes([node])).get(node)
                if record is not None and record.responds:
                    # To one that does not answer the order would come at any time later.
                    for step in new:
                        await self._slurm.kill_step(step)
                    killed.update(new)
            await asyncio.sleep(_PAUSE_S)
        return await self._read_proof(node, contained)

    async def _read_proof(self, node: str, contained: bool) -> Fenced:
        """What it proves that Slurm lists no step of the run there any more: its daemon reports the end of a step once nobody is
        left in the step's cgroup."""
        record = (await self._slurm.list_nodes([node])).get(node)
        lost = self._is_lost(node)
        if not contained and lost:
            return Fenced(
                False, "the node is lost, and this Slurm holds processes by no cgroup (ProctrackType)"
            )
        if record is not None and KILL_FAILED in record.reason:
            return Fenced(False, f"processes there survive kill -9: {record.describe()}")
        if record is None or not record.responds:
            state = record.describe() if record else "Slurm does not know the node"
            return Fenced(False, f"it cannot be reached: {state}")
        return Fenced(True)

    async def _end_there(self, node: str, deadline: float) -> str:
        """Ends what the run has on a node by a program there; why nothing is proven by that, or nothing."""
        left = deadline - asyncio.get_running_loop().time()
        order = StepOrder(self.job, (node,), name_other(self.run_id, "end"), immediate_s=max(1, int(left)))
        program = node_program(
            self._options,
            "end",
            "--run-id",
            self.run_id,
            "--node",
            node,
            "--within",
            f"{max(0.5, left - 1):g}",
        )
        try:
            out = await self._slurm.call(
                *srun(order, self._options, program), within_s=max(0.5, left), env=self._environment
            )
        except (SlurmRefused, NoAnswer) as e:
            return f"its processes cannot be ended: {e.message}"
        for line in out.splitlines():
            with contextlib.suppress(ValueError, TypeError):
                said = json.loads(line)
                if said.get("kind") == "ended":
                    survivors = said.get("survivors") or []
                    if survivors:
                        return f"processes {survivors} survive kill -9"
                    return "" if said.get("proven") else str(said.get("why") or "its end is not proven")
        return "the program that ends them said nothing"

    async def _is_contained(self) -> bool:
        """Whether Slurm holds all processes of a step by a cgroup: the end of a step is the end of all of them then."""
        if self._contained is None:
            self._contained = is_contained(await self._slurm.read_config())
        return self._contained

    async def _list_steps(self, node: str) -> list[str]:
        """The steps of this run of which Slurm has not heard the end, on one node."""
        steps = await self._slurm.list_steps(self.job)
        return [s.id for s in steps if self._launches.is_ours(s.name) and node in s.nodes]

    async def forget(self, node: str) -> None:
        """What could not be proven is asked of Slurm again each time: nothing is remembered here."""

    # --- cordons

    async def cordon(self, cordon: Cordon) -> None:
        held = (await self.cordons()).get(cordon.node)
        if held is not None and held.owner != cordon.owner:
            raise RunError(f"it is cordoned by {held.owner} ({held.reason})", where=cordon.node)
        if self._options.cordon != "own":
            try:
                await self._draining.drain(cordon)
                return
            except NoRight:
                if self._options.cordon == "drain":
                    raise
        self._memory.put({**self._memory.cordons, cordon.node: cordon})
        _log.info("%s is out of use for this run alone: draining needs an operator's rights", cordon.node)

    async def release(self, node: str, owner: str) -> None:
        held = (await self.cordons()).get(node)
        if held is None:
            return
        check_owner(held, owner)
        self._memory.put({n: c for n, c in self._memory.cordons.items() if n != node})
        record = (await self._slurm.list_nodes([node])).get(node)
        if record is not None and record.drained:
            await self._draining.undrain(node)

    async def cordons(self) -> Mapping[str, Cordon]:
        job = await self._slurm.find_job(self.job)
        names = {*(job.nodes if job else ()), *self._memory.given}
        drained = await self._draining.read(await self._slurm.list_nodes(sorted(names))) if names else {}
        own = {n: c for n, c in self._memory.cordons.items() if not c.has_expired(time.time())}
        return drained | own

    async def close(self) -> None:
        await self._watching.stop()
        self._stream.close()
        self._launches.tidy()
