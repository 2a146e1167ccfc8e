"""`unbroken run`: a training script under supervision."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...errors import NoCheckpoint, RunInterrupted, UsageError
from ...units import Bytes, Duration

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_SIZE = ("nodes", "nproc", "spares")


def _duration(option: str, text: str) -> Duration:
    try:
        return Duration(text)
    except UsageError as e:
        raise UsageError(f"{option}: {e.message}", hint=e.hint) from e


def _memory(text: str) -> Bytes:
    return Bytes(0) if text == "auto" else _size("--host-memory", text)


def _size(option: str, text: str) -> Bytes:
    try:
        return Bytes(text)
    except UsageError as e:
        raise UsageError(f"{option}: {e.message}", hint=e.hint) from e


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After '--': script.py and its arguments, '-m module', or a program."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="The run directory. Give it again to go on. Default: runs/<script>")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that train.")] = 1,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 1,
    spares: Annotated[int, typer.Option(min=0, help="Nodes kept ready to take a lost node's place.")] = 0,
    min_nodes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Where no node takes a lost one's place: go on with fewer, down to so many, and with all again once one is back. "
            "Default: wait for one.",
            show_default=False,
        ),
    ] = 0,
    nodes_per_replica: Annotated[
        int,
        typer.Option(
            min=1, help="Nodes that hold one copy of the model together: --min-nodes keeps whole ones."
        ),
    ] = 1,
    patience: Annotated[
        float,
        typer.Option(
            help="For a machine or network that is slower than others: every time-out that is not given is so many times its default."
        ),
    ] = 1.0,
    hang_after: Annotated[
        str, typer.Option(help="A step without progress for this long is a hang. Default: 60s.")
    ] = "",
    suspect_after: Annotated[
        str, typer.Option(help="After this long stacks are collected, nothing else. Default: 5s.")
    ] = "",
    first_step: Annotated[
        str, typer.Option(help="Deadline of start, compilation and first step. Default: 30m.")
    ] = "",
    evaluating: Annotated[str, typer.Option(help="Deadline of the phase evaluating. Default: 1h.")] = "",
    checkpointing: Annotated[
        str, typer.Option(help="Deadline of the phase checkpointing. Default: 30m.")
    ] = "",
    idle_after: Annotated[
        str,
        typer.Option(
            help="For scripts whose steps are unknown: all processors idle for this long is a hang. Default: 30m."
        ),
    ] = "",
    lease: Annotated[
        str, typer.Option(help="A node without its supervisor for this long stops. Default: 15s.")
    ] = "",
    host_memory: Annotated[
        str,
        typer.Option(help="Memory on each node for snapshots, such as 64GiB. Default: half of what is free."),
    ] = "auto",
    cluster: Annotated[
        str,
        typer.Option(
            help="Where its processes run, with what that takes: NAME[,option=value...]. Default: virtual nodes on this "
            "machine (local)."
        ),
    ] = "",
    hosts: Annotated[
        str, typer.Option(help="Hosts to run on over ssh, as a,b,c: short for --cluster hosts,hosts=a,b,c.")
    ] = "",
    ownership: Annotated[
        str,
        typer.Option(help="How processes are held: cgroup, parent, marks. Default: the surest that works."),
    ] = "auto",
    start_from: Annotated[
        str,
        typer.Option(
            "--from",
            help="Start a new run from a checkpoint: one of ours, another run's directory, a DCP folder, safetensors, "
            "a file of torch.save.",
        ),
    ] = "",
    trust_pickle: Annotated[
        bool,
        typer.Option("--trust-pickle", help="Also read pickled objects in --from. They can run any code."),
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="A policy.toml: budgets of restarts, and how sure a verdict must be to stop the run or take a node out of use."
        ),
    ] = None,
    on_divergence: Annotated[
        str,
        typer.Option(
            help="When the loss leaves its band and does not come back: rollback, tell, or auto (rollback where a checkpoint "
            "tells its data position)."
        ),
    ] = "auto",
    warm: Annotated[
        bool | None,
        typer.Option(
            "--warm/--no-warm",
            help="Keep processes ready that have imported what the script imports, for the ranks of the next attempt. They take "
            "a processor for seconds, and memory for as long as they wait. Default: --warm.",
            show_default=False,
        ),
    ] = None,
    warm_after: Annotated[
        str, typer.Option(help="How long after an attempt's first step they are made.")
    ] = "30s",
    stop_within: Annotated[
        str, typer.Option(help="Time to save and exit when asked to stop. Default: 60s.")
    ] = "",
    wait_for_room: Annotated[
        str,
        typer.Option(
            help="At the end: how long the last snapshot waits in memory for a disk that is full or refuses it. Default: 10m."
        ),
    ] = "",
    record: Annotated[
        str,
        typer.Option(
            help="Where the record of the run lies (who supervises, its journal, the checkpoints that count): shared (the "
            "run directory, which other hosts have too), own-disk, or s3://bucket/prefix. Default: by the file system."
        ),
    ] = "auto",
    keep_logs: Annotated[
        str,
        typer.Option(
            help="What the logs of all attempts may take together. Those of older attempts are compressed; beyond this the "
            "oldest go, and then the middle of the longest."
        ),
    ] = "20GiB",
    amend: Annotated[
        bool,
        typer.Option(
            "--amend",
            help="Let the run go on with this command instead of its own, from its last step: a run that is going takes it at "
            "the next step boundary. --nodes and --nproc may change where it has stopped; left out, they stay.",
        ),
    ] = False,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Wait beside the run while somebody else supervises it, and take it over once nobody does: the same command with "
            "this, on another host that has the run directory or the record.",
        ),
    ] = False,
    fork_from: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --from RUN: the step of that run that the new one begins at. Default: its newest.",
        ),
    ] = None,
    resume_arg: Annotated[
        str,
        typer.Option(
            help="For scripts with checkpoints of their own: what to add to the command when it is started again, {} for the "
            "newest whole one, such as '--resume_from_checkpoint {}'. Also in UNBROKEN_RESUME_FROM."
        ),
    ] = "",
    resume_from: Annotated[
        str,
        typer.Option(
            help="Where those lie: a pattern such as 'out/checkpoint-*'. Default: what the script saves below UNBROKEN_OUTPUT."
        ),
    ] = "",
    room_elsewhere: Annotated[
        str,
        typer.Option(
            help="A folder or address where the last checkpoint is written if the disk refuses it even then."
        ),
    ] = "",
) -> None:
    """Runs a training script on N nodes x P ranks so that it survives failures.

    The script is started as torchrun would start it, and needs no change; with `unbroken.attach()` and
    `unbroken.Checkpointer` it is followed step by step and loses next to nothing. The same command goes on
    where a run was interrupted. Exit codes: 0 completed, 10 stopped because a restart cannot help, 11 stopped
    on request (give the same command to go on), 12 and 13 the run directory is another's or in use, 14 it does
    not fit on this machine.
    """
    from ...cluster.options import parse_choice
    from ...progress import RunDir, Timeouts, read_policy
    from ...recover.node.checks.command import check_words
    from ...recover.standby import stand_by
    from ...recover.start import amend_running, make_spec, run_supervised
    from ...recover.submit import submit

    words = command or []
    check_words(words)
    given = {
        "lease": ("--lease", lease), "hang": ("--hang-after", hang_after), "suspect": ("--suspect-after", suspect_after),
        "first_step": ("--first-step", first_step), "evaluating": ("--evaluating", evaluating),
        "checkpointing": ("--checkpointing", checkpointing), "idle": ("--idle-after", idle_after),
        "stop": ("--stop-within", stop_within), "room": ("--wait-for-room", wait_for_room),
    }  # fmt: skip
    times = Timeouts(patience, **{k: _duration(option, text) for k, (option, text) in given.items() if text})
    if hosts:
        if cluster:
            raise UsageError("--hosts and --cluster both say where to run", hint="Write one of the two")
        cluster = f"hosts,hosts={hosts}"
    rules, budgets = read_policy(policy) if policy is not None else (None, None)
    folder = run_dir or Path("runs") / _default_name(words)
    if amend:
        nodes, nproc, spares = _keep_size(ctx, folder, nodes, nproc, spares)
    if fork_from is not None:
        start_from = _find_step(start_from, fork_from)
    spec = make_spec(
        words, nodes=nodes, nproc=nproc, spares=spares, min_nodes=min_nodes, nodes_per_replica=nodes_per_replica, timeouts=times,
        host_memory=_memory(host_memory), ownership=ownership, origin=_absolute(start_from), trust_pickle=trust_pickle,
        room_elsewhere=_absolute(room_elsewhere), record=record.rstrip("/"), resume_arg=resume_arg, resume_from=resume_from,
        warm={None: "auto", True: "on", False: "off"}[warm], warm_after=_duration("--warm-after", warm_after),
        on_divergence=on_divergence, policy=rules, budgets=budgets,
        cluster=parse_choice(cluster) if cluster else None, keep_logs=_size("--keep-logs", keep_logs),
    )  # fmt: skip
    # Before a job is submitted: the run may be going in one.
    if amend and standby:
        raise UsageError("a standby changes nothing of the run", hint="Give --amend without --standby")
    if amend and amend_running(RunDir(folder), spec, print):
        return
    if standby:
        ended = stand_by(RunDir(folder), spec)
    else:
        code = submit(RunDir(folder), spec, _read_arguments(), print)
        if code is not None:
            raise typer.Exit(code)
        ended = run_supervised(RunDir(folder), spec, amend=amend)
    if ended == "interrupted":
        raise RunInterrupted(
            "the run was stopped on request",
            where=str(folder),
            hint="The same command goes on, from the newest checkpoint if one was saved",
        )


def _keep_size(ctx: typer.Context, folder: Path, *given: int) -> tuple[int, ...]:
    """Nodes, ranks and spares of the run, where the command line does not say others."""
    from ...progress import RunDir, read_spec

    path = RunDir(folder).spec
    if not path.exists():
        return given
    spec = read_spec(path)
    sources = [ctx.get_parameter_source(name) for name in _SIZE]
    asked = [source is not None and source.name != "DEFAULT" for source in sources]
    return tuple(now if a else getattr(spec, name) for name, now, a in zip(_SIZE, given, asked, strict=True))


def _find_step(run: str, step: int) -> str:
    """The checkpoint of this step among those of a run. Raises UsageError, InputError, NoCheckpoint."""
    from ...progress import RunDir
    from ...status import gather

    if not run or "://" in run:
        raise UsageError(
            "--fork-from needs the run directory that it takes the step of", hint="Add --from RUN"
        )
    found = [c for c in gather(RunDir(run), with_steps=False).checkpoints if c.counts]
    for c in found:
        if c.step == step:
            return f"{c.place.rstrip('/')}/{c.name}"
    steps = ", ".join(f"{c.step:,}" for c in found[:12]) or "none"
    raise NoCheckpoint(
        f"this run has no checkpoint of step {step:,}", where=run, hint=f"It has, newest first: {steps}"
    )


def _read_arguments() -> list[str]:
    """What stands after `run` on this command line: the same is given to the run in a job."""
    return sys.argv[sys.argv.index("run") + 1 :] if "run" in sys.argv else []


def _absolute(place: str) -> str:
    return place if not place or "://" in place else str(Path(place).absolute())


def _default_name(words: list[str]) -> str:
    """`train` for train.py, `pkg-train` for -m pkg.train, else the program's name."""
    from ...recover.node.checks.command import python_script

    if words[0] == "-m":
        return words[1].replace(".", "-")
    if words[0] in ("python", "python3"):
        script = python_script(words[1:])
    else:
        script = next((w for w in words if w.endswith(".py")), None)
    return Path(script or words[0]).stem.replace(".", "-")
