"""`unbroken run --cluster slurm` on a login node: submits itself as a batch job, shows what becomes of it, and can be cancelled.

The supervisor runs in the job: it outlives the terminal. The script of the job is pure text (`make_script`).
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ....errors import RunError, RunInterrupted, StorageError, UsageError
from ....units import plural
from ...contract import Request
from ..controller.commands import Slurm, SlurmRefused
from ..controller.records import JobRecord
from ..options import SlurmOptions
from .batch import find_excluded, is_over

BATCH_PROGRAM = "unbroken.cluster.slurm.jobs.batch"
_EVERY_S = 1.0
_SAY_AGAIN_S = 600.0
_FAR_S = 300 * 86400.0
_OVER = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "DEADLINE",
    "BOOT_FAIL",
)
_ENDED_BY_LOSS = ("FAILED", "NODE_FAIL")
_NEVER = {
    "PartitionNodeLimit": "it asks for more nodes than the partition gives one job",
    "PartitionTimeLimit": "it asks for more time than the partition gives one job",
    "PartitionConfig": "the partition cannot give what it asks for",
    "BadConstraints": "no node has what it asks for",
    "AssocMaxNodePerJobLimit": "the account may have fewer nodes for one job",
    "QOSMaxNodePerUserLimit": "the user may have fewer nodes",
    "JobHeldUser": "it is held: scontrol release lets it go",
    "JobHeldAdmin": "an operator holds it",
}
"""Reasons for which waiting does not help."""
_WAITS_FOR_TIME = "BeginTime"


@dataclass(frozen=True)
class Submission:
    """A run as a batch job. `arguments` are those of `unbroken run`, with its run directory."""

    options: SlurmOptions
    request: Request
    arguments: tuple[str, ...]
    name: str
    output: Path
    run_dir: Path
    cwd: Path

    def check(self) -> None:
        """Raises UsageError where nothing can be submitted from here."""
        if shutil.which("sbatch") is None or shutil.which("squeue") is None:
            raise UsageError(
                "sbatch and squeue are not on the PATH: this host has no Slurm",
                hint="Run it on a login node, or leave --cluster slurm out",
            )

    async def submit(self, slurm: Slurm) -> str:
        """The id of the new job. Raises RunError with what sbatch said."""
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)  # Slurm makes no folder for an output
        except OSError as e:
            raise StorageError(
                f"the job's output cannot lie there: {e.strerror}",
                where=str(self.output),
                hint="Choose another --run-dir",
            ) from e
        try:
            said = await slurm.call("sbatch", "--parsable", text=make_script(self))
        except SlurmRefused as e:
            raise RunError(
                f"the job was not taken: {e.said}",
                hint="Say the site's options: --cluster slurm,partition=NAME,account=NAME,sbatch=--qos=NAME",
            ) from e
        return said.strip().partition(";")[0]

    async def run(self, say: Callable[[str], None]) -> int:
        """Submits the run and follows it; returns its exit code, 0 where it goes on without us.

        Ctrl-C cancels a job that waits still, and lets go of one that runs.
        """
        slurm = Slurm()
        asked: asyncio.Queue[int] = asyncio.Queue()
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(sig, asked.put_nowait, sig)
        job = await self.submit(slurm)
        say(f"submitted as job {job}; the run directory is {self.run_dir}, the output {self.output}")
        if warning := await find_preemption_risk(slurm, job, float(self.options.poll)):
            say(warning)
        if self.options.detach:
            return 0
        following = asyncio.ensure_future(self.follow(slurm, job, say))
        letting_go = asyncio.ensure_future(asked.get())
        await asyncio.wait({following, letting_go}, return_when=asyncio.FIRST_COMPLETED)
        letting_go.cancel()
        if following.done():
            return following.result()
        following.cancel()
        record = await slurm.find_job(job)
        if record is not None and record.waits and letting_go.result() != signal.SIGHUP:
            await slurm.call("scancel", job)
            say(f"job {job} is cancelled: it had not begun")
            return RunInterrupted.exit_code
        say(
            f"job {job} goes on without this terminal: unbroken status {self.run_dir}; to stop it: scancel {job}"
        )
        return 0

    async def follow(self, slurm: Slurm, job: str, say: Callable[[str], None]) -> int:
        """Says what becomes of the job until it is over; returns its exit code. A job that was requeued is helped to start at
        once: Slurm lets it wait for two minutes."""
        before, said_at = "", 0.0
        shown = Output(self.output)
        while True:
            record = await slurm.find_job(job)
            shown.show(say)
            if record is None or record.state in _OVER:
                ended = await self._read_end(slurm, job)
                if (after := await self._outlive_first_node(slurm, job, ended, say)) == "":
                    return self._describe_end(job, ended, say)
                job, before = after, ""
                await asyncio.sleep(_EVERY_S)  # a requeued job may be listed as it was for a moment
                continue
            words = describe(record)
            if words != before or (record.waits and time.monotonic() - said_at > _SAY_AGAIN_S):
                say(f"job {job} {words}")
                before, said_at = words, time.monotonic()
            if record.waits and record.reason == _WAITS_FOR_TIME:
                await _start_now(slurm, job)
            await asyncio.sleep(_EVERY_S)

    async def _read_end(self, slurm: Slurm, job: str) -> Mapping[str, str]:
        """What Slurm remembers of a job that is over; nothing where that is too long ago."""
        try:
            text = await slurm.call("scontrol", "-o", "show", "job", job)
        except SlurmRefused:
            return {}
        return dict(w.partition("=")[::2] for w in text.split())

    async def _outlive_first_node(
        self, slurm: Slurm, job: str, ended: Mapping[str, str], say: Callable[[str], None]
    ) -> str:
        """The job in which the run goes on where the node of this one's batch script was lost, and the supervisor with it: Slurm ends
        a job with --no-kill then, and requeues nothing (22.05). "" for another end."""
        host = ended.get("BatchHost", "")
        if self.options.requeue == "no" or not host or ended.get("JobState") not in _ENDED_BY_LOSS:
            return ""
        try:
            node = (await slurm.list_nodes([host])).get(host)
        except RunError:
            return ""  # how it ended is known all the same
        if node is None or not (node.down or not node.responds) or is_over(self.run_dir):
            return ""
        lost = f"job {job} ended with {host}, the node of its batch script ({node.describe()})"
        if self.options.requeue != "successor":
            try:
                await slurm.call("scontrol", "requeue", job)
            except RunError as e:
                lost += f", and cannot be requeued ({e.message})"
                if self.options.requeue == "requeue":
                    say(f"{lost}. The same command goes on")
                    return ""
            else:
                say(f"{lost}: it is requeued and goes on from its newest checkpoint on disk")
                return job
        exclude = self.request.exclude | frozenset(find_excluded(self.run_dir))
        new = await replace(self, request=replace(self.request, exclude=exclude)).submit(slurm)
        say(f"{lost}: job {new} goes on from the newest checkpoint on disk")
        return new

    def _describe_end(self, job: str, ended: Mapping[str, str], say: Callable[[str], None]) -> int:
        if not ended:
            say(f"job {job} is over; Slurm remembers no more of it. Its output is in {self.output}")
            return 1
        state, code = ended.get("JobState", ""), ended.get("ExitCode", "1:0")
        say(f"job {job} is over: {state.lower()}; its output is in {self.output}")
        number, _, by = code.partition(":")
        return int(number) or (128 + int(by) if by.isdigit() and int(by) else 0)


async def find_preemption_risk(slurm: Slurm, job: str, poll_s: float) -> str:
    """Why this job may be ended for another one before it can save, in words; "" where it is told in time, or never is."""
    try:
        if (await slurm.read_config()).get("PreemptType", "preempt/none") == "preempt/none":
            return ""
        queue, known = await slurm.read_queue(job), await slurm.list_partitions()
        takers = [known[p] for p in queue.partitions if p in known and known[p].preempts]
        grace = await slurm.read_grace(queue)
    except RunError:
        return ""  # what cannot be asked is no reason to hold a job up
    if not takers or (grace is not None and grace > poll_s):
        return ""
    where = ", ".join(f"{t.name} (PreemptMode={t.mode})" for t in takers)
    notice = (
        f"the notice of its QOS ({queue.qos or 'none'}) cannot be read here" if grace is None
        else "without any notice (GraceTime=0)" if not grace
        else f"with {grace:g} s of notice (GraceTime), of which up to {poll_s:g} s pass before it is seen (poll)"
    )  # fmt: skip
    return (
        f"job {job} can be preempted in partition {where}, {notice}: what came after its newest checkpoint on disk would be lost. "
        "Persist often, or ask for a partition or QOS with a longer GraceTime"
    )


async def _start_now(slurm: Slurm, job: str) -> None:
    try:
        await slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
    except SlurmRefused:
        return  # a site that does not let its users do it: it starts by itself


def describe(record: JobRecord) -> str:
    """What a job does, in words."""
    if record.waits:
        when = f", expected to start {_clock(record.starts)}" if record.starts else ""
        never = f" ({_NEVER[record.reason]}: it will not start as it is)" if record.reason in _NEVER else ""
        return f"waits: {record.reason}{never}{when}"
    if record.runs:
        # Slurm shows a limit of a year where there is none.
        until = f" until {_clock(record.ends)}" if record.ends and record.ends < time.time() + _FAR_S else ""
        return f"runs on {plural(len(record.nodes), 'node')} ({', '.join(record.nodes[:8])}){until}"
    return f"is {record.state.lower()}"


def make_script(s: Submission) -> str:
    """The batch script: what is asked of Slurm, the site's set-up lines, and the run."""
    total = s.request.nodes + s.request.spares
    asked = [
        f"--job-name={s.name}", f"--nodes={total}", "--ntasks-per-node=1", "--no-kill", "--open-mode=append",
        f"--output={s.output}", f"--chdir={s.cwd}",
    ]  # fmt: skip
    if s.options.requeue in ("auto", "requeue"):
        asked.append("--requeue")
    for key, value in (
        ("partition", s.options.partition),
        ("account", s.options.account),
        ("time", s.options.time),
    ):
        if value:
            asked.append(f"--{key}={value}")
    if s.options.gpus:
        asked.append(f"--gpus-per-node={s.options.gpus}")
    if s.request.exclude:
        asked.append(f"--exclude={','.join(sorted(s.request.exclude))}")
    asked += s.options.sbatch
    lines = ["#!/bin/bash", *(f"#SBATCH {a}" for a in asked)]
    if s.options.setup is not None and not s.options.image:
        lines.append(f". {shlex.quote(str(s.options.setup.absolute()))}")
    command = [sys.executable, "-m", BATCH_PROGRAM, "--requeue", s.options.requeue, "--", *s.arguments]
    # exec: what Slurm sends before it ends a job goes to the script's own process.
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


class Output:
    """The output of a job, as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def show(self, say: Callable[[str], None]) -> None:
        """Says the whole lines that have come."""
        try:
            with open(self._path, "rb") as f:
                f.seek(self._offset)
                data = f.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            say(f"  {line}")


def rebuild_arguments(words: Sequence[str], run_dir: Path) -> tuple[str, ...]:
    """The arguments of this `unbroken run` for the one in the job: the same, with the run directory as it is found there."""
    at = list(words).index("--") if "--" in words else len(words)
    own, command = list(words[:at]), words[at:]
    for i, word in enumerate(own):
        if word == "--run-dir" and i + 1 < len(own):
            own[i + 1] = str(run_dir)
            break
        if word.startswith("--run-dir="):
            own[i] = f"--run-dir={run_dir}"
            break
    else:
        own += ["--run-dir", str(run_dir)]
    return (*own, *command)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M on %d %b", time.localtime(seconds))
