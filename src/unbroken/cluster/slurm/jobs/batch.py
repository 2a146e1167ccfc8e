"""The program of a batch job that `unbroken run --cluster slurm` has submitted: runs the run, and has it go on in another job.
A script of the user's own may run it too.

    python -m unbroken.cluster.slurm.jobs.batch --requeue auto -- ARGUMENTS OF unbroken run

A supervisor that is killed is started again: it takes over what runs. A run that was stopped by Slurm's signals (time limit,
preemption) or by the end of the allocation is requeued; where the site forbids that, a successor waits for the end of this job.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....errors import RunError, RunInterrupted, UnbrokenError
from ....progress import RunDir, read_journal
from ....progress.records.state import RunState
from ..controller.commands import Slurm

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STARTS = 5
_MODES = ("auto", "requeue", "successor", "no")


class Child:
    """The supervisor, and the signals that it is sent."""

    def __init__(self) -> None:
        self.signalled = False
        self._process: subprocess.Popen[bytes] | None = None
        for sig in SIGNALS:
            signal.signal(sig, self._pass_on)

    def _pass_on(self, sig: int, _: object) -> None:
        if self.signalled and sig != signal.SIGINT:
            return  # Slurm may send several; a second request would end the ranks at once
        self.signalled = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(sig)

    def run(self, argv: Sequence[str]) -> int:
        """Runs it to its end; its exit code, negative for a signal."""
        self._process = subprocess.Popen(argv)
        return self._process.wait()


def run(child: Child, arguments: Sequence[str]) -> int:
    """The run, started again where its supervisor is killed. Its exit code."""
    argv = [sys.executable, "-m", "unbroken", "run", *arguments]
    for attempt in range(1, _STARTS + 1):
        code = child.run(argv)
        if code >= 0 or child.signalled:
            break
        say(f"the supervisor was killed by signal {-code}; start {attempt + 1} of {_STARTS} takes over")
    return code if code >= 0 else 128 - code


async def go_on(job: str, mode: str, excluded: Sequence[str], script: str) -> str:
    """Has the run go on in another job; says how, or why not."""
    slurm = Slurm()
    record = await slurm.find_job(job)
    if record is None or not record.runs:
        return f"the job is {record.state.lower() if record else 'over'}: it is not requeued. The same command goes on"
    why = ""
    if mode in ("auto", "requeue"):
        try:
            await slurm.call("scontrol", "requeue", job)
        except RunError as e:
            why = f" ({e.message})"
            if mode == "requeue":
                return f"it cannot be requeued{why}. The same command goes on"
        else:
            said = f"job {job} is requeued and goes on"
            if excluded:
                # Of a running job it cannot be changed; of one that was just requeued it can.
                try:
                    await slurm.call(
                        "scontrol", "update", f"jobid={job}", f"ExcNodeList={','.join(excluded)}"
                    )
                    said += f", without {', '.join(excluded)}"
                except RunError as e:
                    said += f"; it may get {', '.join(excluded)} again ({e.message})"
            return said
    exclude = [f"--exclude={','.join(excluded)}"] if excluded else []
    try:
        new = await slurm.call("sbatch", "--parsable", f"--dependency=afterany:{job}", *exclude, text=script)
    except RunError as e:
        return f"neither requeued{why} nor submitted again ({e.message}). The same command goes on"
    return f"job {new.strip().partition(';')[0]} goes on when this one is over" + (
        f": it cannot be requeued{why}" if why else ""
    )


def find_step(run_dir: Path) -> int:
    """The furthest step that the run's journal knows of; -1 before the first."""
    try:
        return RunState.of(read_journal(RunDir(run_dir)).records).step
    except (OSError, UnbrokenError):
        return -1


def find_excluded(run_dir: Path) -> list[str]:
    """Nodes that the run will not have again, as its journal says."""
    try:
        state = RunState.of(read_journal(RunDir(run_dir)).records)
    except (OSError, UnbrokenError):
        return []
    return sorted(state.cordoned)


def name_job(environ: Mapping[str, str]) -> str:
    """This job, as commands take it: of an array the one task, since its number may be that of the whole array."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]


def is_over(run_dir: Path) -> bool:
    """Whether the run has ended by itself: no other job is to go on with it."""
    try:
        return RunState.of(read_journal(RunDir(run_dir)).records).status in ("completed", "stopped")
    except (OSError, UnbrokenError):
        return False


def find_run_dir(arguments: Sequence[str]) -> Path:
    """The run directory among the arguments, which the submission has put there."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--run-dir":
            return Path(following)
        if word.startswith("--run-dir="):
            return Path(word.partition("=")[2])
    return Path()


def read_script() -> str:
    """The script of this job, as Slurm keeps it beside its processes: bash's own copy is the first argument of none."""
    done = subprocess.run(
        ["scontrol", "write", "batch_script", name_job(os.environ), "-"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done.stdout


def say(text: str) -> None:
    print(f"unbroken: {text}", flush=True)


def main() -> int:
    """Entry point of the batch job."""
    at = sys.argv.index("--")
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--requeue", choices=_MODES, default="auto")
    args = parser.parse_args(sys.argv[1:at])
    arguments = sys.argv[at + 1 :]
    script = read_script() if args.requeue in ("auto", "successor") else ""
    run_dir, child = find_run_dir(arguments), Child()
    before = find_step(run_dir)
    code = run(child, arguments)
    if code != RunInterrupted.exit_code or args.requeue == "no":
        return code
    if not child.signalled and find_step(run_dir) <= before:
        # By itself it would be so for ever.
        say("this job ended before a step was made: its time limit leaves no more than is kept for saving. Ask for more: "
            "--cluster slurm,time=...")  # fmt: skip
        return code
    job = name_job(os.environ)
    say(asyncio.run(go_on(job, args.requeue, find_excluded(run_dir), script)))
    return code


if __name__ == "__main__":
    sys.exit(main())
