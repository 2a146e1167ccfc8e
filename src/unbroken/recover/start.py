"""From a command line to a supervised run: checks what can be checked before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

from ..checkpoint.catalogue.placement import CLAIMS, check_folder
from ..checkpoint.convert.origin import find_origin
from ..checkpoint.format.manifest import COMMITTED
from ..cluster.contract import Cluster, ClusterAway, NodeRefuses, Request
from ..cluster.local_folder import forget_run, hold_run
from ..cluster.registry import find_cluster, make_cluster
from ..errors import (
    RunDirMismatch,
    RunError,
    RunInterrupted,
    RunInUse,
    UnbrokenError,
    UsageError,
)
from ..progress import (
    Budgets,
    ClusterChoice,
    Policy,
    RunDir,
    RunSpec,
    Timeouts,
    check_same,
    read_journal,
    read_spec,
    write_spec,
)
from ..progress.records.candidate import parse_folder_name
from ..progress.records.state import RunState
from ..progress.spec import KEEP_LOGS, WARM_AFTER
from ..units import Bytes, Duration
from .amend import amend_live
from .node.checks.command import check_command, check_words
from .record.base import Record
from .record.choice import check_record, open_record
from .record.folder import FolderRecord
from .room import RUN_DIR_NEEDS, check_places, unwritable, wait_for_room
from .supervise.incident.diagnosing import IncidentDiagnosis
from .supervise.nodes.away import AWAY_AGAIN_S
from .supervise.screen.terminal_log import logged_to
from .supervise.screen.view import Lines, View
from .supervise.supervisor import Supervisor
from .supervise.surroundings import Surroundings
from .telling.webhook import open_webhook

STOP_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
    signal.SIGPWR,
)  # fmt: skip
"""What terminals and schedulers send to say that the end is near; unhandled, each would end the supervisor unsaved.
docs/reference/signals.md has the list."""
_MAKE = {
    "token": "(umask 077; openssl rand -hex 16 > token)",
    "identity.pem": "(umask 077; openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -batch -subj "
    "/CN=unbroken -days 3650 -keyout /dev/stdout | cat > identity.pem)",
}  # fmt: skip
"""How a person makes key files in the place of lost ones."""
T = TypeVar("T")
_log = logging.getLogger(__name__)
_UNASKED = ClusterChoice("")
"""No cluster was asked for: it is that of the run, or this machine."""


def make_spec(
    command: Sequence[str],
    *,
    nodes: int = 1,
    nproc: int = 1,
    spares: int = 0,
    min_nodes: int = 0,
    nodes_per_replica: int = 1,
    timeouts: Timeouts | None = None,
    budgets: Budgets | None = None,
    policy: Policy | None = None,
    host_memory: Bytes = Bytes(0),
    ownership: str = "auto",
    origin: str = "",
    trust_pickle: bool = False,
    room_elsewhere: str = "",
    resume_arg: str = "",
    resume_from: str = "",
    record: str = "auto",
    keep_logs: Bytes = KEEP_LOGS,
    on_divergence: str = "auto",
    warm: str = "auto",
    warm_after: Duration = WARM_AFTER,
    cluster: ClusterChoice | None = None,
) -> RunSpec:
    """A spec with a fresh run id, for a `cluster` or wherever its run is already. Raises UsageError on impossible numbers."""
    return RunSpec(
        command=tuple(command), run_id=secrets.token_hex(6), nodes=nodes, nproc=nproc, spares=spares,
        min_nodes=min_nodes, nodes_per_replica=nodes_per_replica, timeouts=timeouts or Timeouts(), budgets=budgets or Budgets(), policy=policy or Policy(), host_memory=host_memory, ownership=ownership,
        origin=origin, trust_pickle=trust_pickle, room_elsewhere=room_elsewhere, record=check_record(record),
        resume_arg=resume_arg, resume_from=resume_from, keep_logs=keep_logs,
        on_divergence=on_divergence, warm=warm, warm_after=warm_after,
        cluster=cluster or _UNASKED,
    )  # fmt: skip


def settle_spec(run_dir: RunDir, wanted: RunSpec, *, amend: bool = False) -> RunSpec:
    """The spec to use: a new run's own, or that of the run directory with the settings asked for now.

    A setting that is asked for with its default value stays as run.toml has it, so that an edited file counts. The
    supervisor writes changed settings once it has claimed the run. With `amend` command, nodes and ranks are settings too.
    Raises RunDirMismatch where the directory belongs to another command line.
    """
    if not run_dir.spec.exists():
        _take_in(run_dir)
        if run_dir.path.is_dir() and (stray := _strangers(run_dir)):
            raise UsageError(
                f"the folder is not empty and no run directory (it holds {', '.join(stray[:3])})",
                where=str(run_dir.path),
                hint="Choose another --run-dir",
            )
        try:
            run_dir.create()
            new = dataclasses.replace(wanted, cluster=_choose_cluster(wanted, None))
            if write_spec(run_dir, new, first=True):
                return new
        except OSError as e:
            raise unwritable(run_dir, e) from e
    old = read_spec(run_dir.spec)
    check_same(old, wanted, run_dir, amend=amend)
    return dataclasses.replace(
        wanted, run_id=old.run_id, timeouts=_asked(wanted.timeouts, old.timeouts),
        budgets=_asked(wanted.budgets, old.budgets), policy=_asked(wanted.policy, old.policy), host_memory=wanted.host_memory or old.host_memory,
        origin=old.origin, trust_pickle=wanted.trust_pickle or old.trust_pickle,
        ownership=old.ownership if wanted.ownership == "auto" else wanted.ownership,
        room_elsewhere=wanted.room_elsewhere or old.room_elsewhere,
        min_nodes=wanted.min_nodes or old.min_nodes,
        nodes_per_replica=old.nodes_per_replica if wanted.nodes_per_replica == 1 else wanted.nodes_per_replica,
        on_divergence=old.on_divergence if wanted.on_divergence == "auto" else wanted.on_divergence,
        warm=old.warm if wanted.warm == "auto" else wanted.warm,
        warm_after=old.warm_after if wanted.warm_after == WARM_AFTER else wanted.warm_after,
        resume_arg=wanted.resume_arg or old.resume_arg, resume_from=wanted.resume_from or old.resume_from,
        keep_logs=old.keep_logs if wanted.keep_logs == KEEP_LOGS else wanted.keep_logs,
        record=old.record if wanted.record == "auto" else wanted.record, cluster=_choose_cluster(wanted, old),
    )  # fmt: skip


def _choose_cluster(wanted: RunSpec, old: RunSpec | None) -> ClusterChoice:
    if wanted.cluster != _UNASKED:
        return wanted.cluster
    return old.cluster if old is not None else ClusterChoice()


def _open_cluster(run_dir: RunDir, spec: RunSpec) -> Cluster:
    """The spec's cluster. Raises UsageError, also for a way of holding processes where the cluster has none of its own;
    RunError where it cannot be loaded."""
    name, options = spec.cluster.name, dict(spec.cluster.options)
    if spec.ownership != "auto":
        if "ownership" not in {f.name for f in dataclasses.fields(find_cluster(name).Options)}:
            raise UsageError(
                f"the cluster '{name}' holds processes in its own way", hint="Leave --ownership out"
            )
        options["ownership"] = spec.ownership
    return make_cluster(name, spec.run_id, options, log_of=run_dir.agent_log)


def check_cluster(
    run_dir: RunDir, wanted: RunSpec, here: Path, *, goes_on: bool, say: Callable[[str], None]
) -> None:
    """Raises UsageError, InputError, DoesNotFit, RunError where the run cannot have its cluster, or not on it what it asks
    for, as far as that can be known before anything is written.

    A run that goes on waits for a cluster that does not answer, as a supervisor does that meets this later: whoever gives up
    here leaves ranks that may train, and nobody to take them over.
    """
    old = read_spec(run_dir.spec) if run_dir.spec.exists() else None
    spec = dataclasses.replace(wanted, cluster=_choose_cluster(wanted, old))
    if wanted.ownership == "auto" and old is not None:
        spec = dataclasses.replace(spec, ownership=old.ownership)
    cluster = _open_cluster(run_dir, spec)
    if cluster.socket_folder is not None:
        check_command(wanted.command, here)  # elsewhere the agents look, where the ranks will be
    request = Request(wanted.nodes, wanted.spares, wanted.nproc)
    if not goes_on:
        return cluster.check(request)
    told = ""
    with stop_ends_wait(run_dir, "for its cluster"):
        while True:
            try:
                return cluster.check(request)
            except ClusterAway as e:
                if e.message != told:
                    told = e.message
                    say(f"{told}; the run goes on as soon as that is over (Ctrl-C ends the wait)")
            except NodeRefuses as e:
                say(f"{e} The run goes on with the others")
                return None
            time.sleep(AWAY_AGAIN_S)


@contextlib.contextmanager
def stop_ends_wait(run_dir: RunDir, where: str) -> Iterator[None]:
    """Each of STOP_SIGNALS ends what is done meanwhile, which waits `where`: raises RunInterrupted. Nothing has been claimed yet, and the
    run is as it was."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # nothing else comes out of any callback of an event loop

    before = {s: signal.signal(s, stop) for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        yield
    except KeyboardInterrupt:
        raise RunInterrupted(
            f"stopped while it waited {where}; the run is as it was",
            where=str(run_dir.path),
            hint="The same command goes on",
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow_journal(run_dir: RunDir, record: Record) -> None:
    """Puts into run.toml what the journal says that the run was amended to, where a supervisor was killed in between."""
    try:
        state = RunState.of(record.read().records)
        old = read_spec(run_dir.spec)
    except (OSError, UnbrokenError):
        return  # who claims the run says what is wrong with it
    if state.amended:
        new = dataclasses.replace(old, command=state.command, nodes=state.nodes, nproc=state.nproc)
        if new != old:
            write_spec(run_dir, new)


def _check_journal(run_dir: RunDir, record: Record, spec: RunSpec) -> None:
    """Raises RunDirMismatch where run.toml was edited into another run than the journal is of."""
    try:
        records = record.read().records
    except (OSError, UnbrokenError):
        return  # who claims the run says what is wrong with it
    began = next((r for r in records if r["kind"] == "run"), None)
    state = RunState.of(records)
    if began is None or state.amended:
        return
    now = {"command": list(spec.command), "nodes": spec.nodes, "nproc": spec.nproc, "run_id": spec.run_id}
    for key, value in now.items():
        if key in began and began[key] != value:
            raise RunDirMismatch(
                f"run.toml says {key} = {value}, but this run began with {began[key]}",
                where=str(run_dir.spec),
                hint="Put that back, or give the command with --amend; to go on with others beside it start a new run: "
                f"unbroken run --from {run_dir.path} ...",
            )


def _has_started(record: Record) -> bool:
    """Whether the run has copied what it starts from, and needs it no more."""
    try:
        return bool(RunState.of(record.read().records).origin)
    except (OSError, UnbrokenError):
        return False


def _goes_on(record: Record) -> bool:
    """Whether it is a run whose end nobody has written down: its ranks may train, its keepers hold what is in memory only."""
    try:
        records = record.read().records
    except (OSError, UnbrokenError):
        return False
    return bool(records) and RunState.of(records).status == "running"


def _asked(wanted: T, old: T) -> T:
    """`old` with those settings of `wanted` that are not at their default."""
    default = type(wanted)()
    return dataclasses.replace(
        old,  # type: ignore[type-var]
        **{
            f.name: getattr(wanted, f.name)
            for f in dataclasses.fields(wanted)  # type: ignore[arg-type]
            if getattr(wanted, f.name) != getattr(default, f.name)
        },
    )


def _take_in(run_dir: RunDir) -> None:
    """Moves what `checkpoint import --to` put into a folder, before it was a run's, to where a run has its checkpoints."""
    if not run_dir.path.is_dir():
        return
    imported = [p for p in run_dir.path.iterdir() if parse_folder_name(p.name) and (p / COMMITTED).is_file()]
    if not imported:
        return
    claims = [p for p in run_dir.attempts.glob("[0-9]*") if p.is_file()]
    for folder, things in ((run_dir.checkpoints, imported), (run_dir.checkpoints / CLAIMS, claims)):
        for path in things:
            folder.mkdir(parents=True, exist_ok=True)
            path.rename(folder / path.name)


def _strangers(run_dir: RunDir) -> list[str]:
    """What lies in the folder and is not what a call leaves that was killed before it had written run.toml."""
    ours = {
        p.name
        for p in (run_dir.terms, run_dir.journals, run_dir.attempts, run_dir.checkpoints, run_dir.incidents)
    }

    def harmless(path: Path) -> bool:
        if path.name.startswith(".run.toml.") and path.name.endswith(".aside"):
            return True
        if path.name == run_dir.checkpoints.name and path.is_dir():  # imported before the first start
            return all(parse_folder_name(p.name) or p.name == CLAIMS for p in path.iterdir())
        return path.name in ours and path.is_dir() and not any(path.iterdir())

    return sorted(p.name for p in run_dir.path.iterdir() if not harmless(p))


def find_record(run_dir: RunDir, wanted: RunSpec) -> Record:
    """Where the run's record lies, as it was asked for now or before; checked, and its run.toml fetched where there is none
    here. Raises RunInUse, StorageError, UsageError, MissingExtra."""
    text = wanted.record
    if text == "auto" and run_dir.spec.exists():
        text = read_spec(run_dir.spec).record
    record = open_record(run_dir, text)
    record.check()
    _check_keys(run_dir, record)
    record.fetch_spec()
    return record


def _check_keys(run_dir: RunDir, record: Record) -> None:
    """Raises RunInUse where the run may go on elsewhere and its keys are not here: with others its supervisor would prove
    nothing, seem to be gone, and its agents could follow nobody any more."""
    terms = record.terms()
    if not terms or terms[-1].supervisor_is_gone():
        return
    needed = [run_dir.token, *([run_dir.identity] if str(terms[-1].address).startswith("tls:") else [])]
    missing = [p.name for p in needed if not p.exists()]
    if missing and RunState.of(record.read().records).status in ("running", "new"):
        raise RunInUse(
            f"this run may go on: its supervisor is process {terms[-1].pid} on {terms[-1].host}, and only who has the run's "
            f"key files can ask it; {' and '.join(missing)} is not here",
            where=record.where,
            hint=f"Copy token (and identity.pem) from the run directory there into {run_dir.path}, mode 0600. Where nothing "
            f"of the run is left anywhere, make your own: {' ; '.join(_MAKE[p.name] for p in needed if not p.exists())}",
        )


def _check_host(run_dir: RunDir, record: Record) -> None:
    """Raises RunInUse where the run may go on on other machines, and its record is said to lie on the own disk of another host
    than this: what is here is a copy, and the run's agents look for a supervisor on that host only."""
    if not isinstance(record, FolderRecord) or record.shared:
        return
    terms = record.terms()
    if not terms or not str(terms[-1].address).startswith("tls:") or terms[-1].host == socket.gethostname():
        return
    if RunState.of(record.read().records).status in ("running", "new"):
        raise RunInUse(
            f"the record of this run lies on the own disk of {terms[-1].host}, where its supervisor was: its agents look for "
            "another one there alone, so that the loss of that host ends the run",
            where=str(run_dir.path),
            hint=f"Give the command on {terms[-1].host}. If that host is lost, go on from its checkpoints in a new run: unbroken run "
            f"--from {run_dir.path} --run-dir ANOTHER ...; with --record s3://... or a shared folder another host can take over",
        )


def amend_running(run_dir: RunDir, wanted: RunSpec, say: Callable[[str], None]) -> bool:
    """Whether a live supervisor, wherever it is, took the command that is asked for now: an attempt runs with it then.

    Raises UsageError where there is no run, RunDirMismatch where something else than the command, nodes and ranks is another
    one, and the other errors of `unbroken.errors.RunError`.
    """
    if not run_dir.spec.exists():
        raise UsageError(
            "there is no run to amend",
            where=str(run_dir.path),
            hint="Name its --run-dir, or leave --amend out",
        )
    check_same(read_spec(run_dir.spec), wanted, run_dir, amend=True)
    return asyncio.run(amend_live(run_dir, find_record(run_dir, wanted), wanted, say))


def run_supervised(
    run_dir: RunDir,
    wanted: RunSpec,
    *,
    view: View | None = None,
    cwd: Path | None = None,
    amend: bool = False,
) -> str:
    """Runs a spec to its end in this process; returns completed or interrupted.

    With `amend` the run goes on with the command, nodes and ranks that are asked for now. Each of STOP_SIGNALS asks for a stop at a step boundary. What the parts log goes to the view. Raises the errors of `unbroken.errors.RunError`.
    """
    here = cwd or Path.cwd()
    check_words(wanted.command)
    if not sys.platform.startswith("linux"):
        raise RunError("unbroken run needs Linux", hint="Use a Linux machine or container")
    check_folder(run_dir.path, "the run directory")
    record = find_record(run_dir, wanted)
    shown = view or Lines()
    goes_on = _goes_on(record)
    if goes_on:
        wait_for_room(run_dir, shown.say)
    if run_dir.spec.exists():
        follow_journal(run_dir, record)
        check_same(read_spec(run_dir.spec), wanted, run_dir, amend=amend)
    _check_host(run_dir, record)
    # Before anything is written: a directory that remembers what did not fit would refuse what does.
    check_cluster(run_dir, wanted, here, goes_on=goes_on, say=shown.say)
    if wanted.origin and not _has_started(record):
        find_origin(wanted.origin, trust=wanted.trust_pickle)  # before anything is written
    spec = settle_spec(run_dir, wanted, amend=amend)
    record.share_spec(spec.run_id)
    if not amend:
        _check_journal(run_dir, record, spec)
    check_places(run_dir, at_least=Bytes(0) if goes_on else RUN_DIR_NEEDS)
    on_this_machine: list[Path] = []

    async def go() -> str:
        cluster = _open_cluster(run_dir, spec)
        if (folder := cluster.socket_folder) is None:
            return await supervise(cluster)
        on_this_machine.append(folder)
        with hold_run(folder):
            return await supervise(cluster)

    async def supervise(cluster: Cluster) -> str:
        surroundings = Surroundings(
            cluster, IncidentDiagnosis(folder=run_dir.path), record=record, webhook=open_webhook()
        )
        supervisor = Supervisor(run_dir, spec, surroundings, shown, cwd=here)
        loop = asyncio.get_running_loop()
        for sig in STOP_SIGNALS:
            # Under nohup a closed terminal is to be ignored, and stays ignored.
            if signal.getsignal(sig) is not signal.SIG_IGN:
                loop.add_signal_handler(sig, supervisor.request_stop)
        return await supervisor.run()

    try:
        with logged_to(shown):
            return asyncio.run(go())
    finally:
        # Agents that ended before it have left this to the supervisor, whose socket lay there.
        for folder in on_this_machine:
            forget_run(folder)
        report = _write_report(run_dir)
        if report is not None:
            shown.say(f"the report: {report}")


def _write_report(run_dir: RunDir) -> Path | None:
    """Writes the report of a run that has ended, in whatever way, and never raises.

    Where the run is another supervisor's by now, its journal says that it runs, and its report is that one's.
    """
    try:
        status = RunState.of(read_journal(run_dir).records).status
    except (OSError, UnbrokenError):
        return None
    if status not in ("completed", "stopped", "interrupted"):
        return None
    try:
        from ..status import write_report_safely
    except ModuleNotFoundError as e:  # an image with no more than torch needs still runs
        _log.warning("there is no page of this run: %s is not installed. `unbroken report` draws it where it is", e.name)  # fmt: skip
        return None
    return write_report_safely(run_dir)
