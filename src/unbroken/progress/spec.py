"""What was asked of a run (`run.toml`): the command line and the settings that a later call may not change."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import InputError, RunDirMismatch, UnknownKey, UsageError, unreadable
from ..units import Bytes, Duration
from .rundir import RunDir

FIXED = ("command", "nodes", "nproc", "run_id")
"""Keys that belong to the identity of a run; the others may differ from one call to the next."""

KEEP_LOGS = Bytes("20GiB")
WARM = ("auto", "on", "off")
WARM_AFTER = Duration(30)
ON_DIVERGENCE = ("auto", "rollback", "tell")
OWNERSHIPS = ("auto", "cgroup", "parent", "marks")


_DERIVED: Any = None
_TIMEOUTS_S = {
    "lease": 15, "hang": 60, "suspect": 5, "first_step": 1800, "evaluating": 3600, "checkpointing": 1800, "idle": 1800, "stop": 60,
    "room": 600, "pair": 30, "pairs": 120,
}  # fmt: skip


@dataclass(frozen=True)
class Timeouts:
    """How long to wait, in seconds. What is not given is its default times `patience`; all are checked to nest."""

    patience: float = 1.0
    """The one setting for a machine or network that is slower than others: all defaults times so much."""
    lease: Duration = _DERIVED
    """15 s: a node that has not heard from its supervisor for this long stops its ranks."""
    hang: Duration = _DERIVED
    """60 s: a training step that makes no progress for this long is declared hung (never below four times the
    slowest of the last hundred steps)."""
    suspect: Duration = _DERIVED
    """5 s: after this long without a step the stacks are collected, nothing else."""
    first_step: Duration = _DERIVED
    """30 min: deadline of the phases starting and compiling."""
    evaluating: Duration = _DERIVED
    """1 h: deadline of an evaluation inside the training process."""
    checkpointing: Duration = _DERIVED
    """30 min: deadline of a checkpoint that holds the training process up."""
    idle: Duration = _DERIVED
    """30 min: for scripts that do not tell their progress and print no step, idle CPUs and GPUs for this long."""
    stop: Duration = _DERIVED
    """60 s: time for the ranks to checkpoint and exit when the run is asked to stop."""
    room: Duration = _DERIVED
    """10 min: how long the last snapshot waits, at an end, for a storage that refuses it (full disk, used-up quota)."""
    pair: Duration = _DERIVED
    """30 s: one test of two nodes."""
    pairs: Duration = _DERIVED
    """2 min: the test of all nodes in pairs, while nobody trains."""

    def __post_init__(self) -> None:
        if (
            isinstance(self.patience, bool)
            or not isinstance(self.patience, int | float)
            or not 0 < self.patience < math.inf
        ):
            raise UsageError(
                f"timeout 'patience' must be a number above zero, not {self.patience!r}",
                hint="1 is the default",
            )
        derived = [name for name in _TIMEOUTS_S if getattr(self, name) is None]
        for name in derived:
            object.__setattr__(self, name, Duration(_TIMEOUTS_S[name] * self.patience))
        for name in _TIMEOUTS_S:
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, Duration(value))
            except (TypeError, ValueError):
                raise UsageError(f"timeout '{name}' must be a duration, not {value!r}") from None
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"timeout '{name}' must be above zero and finite, not {value}")
        if "suspect" in derived:
            object.__setattr__(self, "suspect", min(self.suspect, self.hang))
        if self.suspect > self.hang:
            raise UsageError(
                f"timeouts do not nest: suspect ({self.suspect}) is longer than hang ({self.hang})",
                hint="Set suspect to at most hang",
            )
        if self.hang > self.first_step:
            raise UsageError(
                f"timeouts do not nest: hang ({self.hang}) is longer than first_step ({self.first_step})",
                hint="Raise first_step: the first step compiles and restores, and is the slowest",
            )
        if self.pair > self.pairs:
            raise UsageError(
                f"timeouts do not nest: pair ({self.pair}) is longer than pairs ({self.pairs}), which no test would fit into",
                hint="Set pairs to at least four times pair: fewer rounds convict nobody",
            )
        if self.lease < 2:
            raise UsageError(
                f"a lease of {self.lease} is too short to survive a busy machine", hint="Use 2s or more"
            )


@dataclass(frozen=True)
class Budgets:
    """How many restarts each cause may take before the run stops; refilled by progress."""

    failure: int = 10
    hang: int = 5
    node_loss: int = 20
    killed: int = 20
    """Ranks ended from outside by a signal that nothing explains."""
    framework: int = 3
    unknown: int = 5
    loss: int = 3
    """Rollbacks near the same step: no number of them repairs a cause."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if not isinstance(getattr(self, f.name), int) or getattr(self, f.name) < 0:
                raise UsageError(f"budget '{f.name}' must be a whole number from 0 up")


@dataclass(frozen=True)
class Policy:
    """From a verdict and how sure it is to an action: what a doubtful one may never do, and how many nodes may go."""

    stop_at: float = 0.5
    """A verdict that is less sure never ends the run for good: it is restarted, within the budget of its cause."""
    cordon_at: float = 0.6
    """A verdict that is less sure takes no node out of use."""
    cordons_per_hour: int = 8
    """So many nodes may be taken out of use within an hour, lost ones not counted: a detector gone mad cannot empty the cluster."""
    cordons_per_hour_and_cause: int = 4
    """And so many of them for the same reason."""
    on_doubt: str = "auto"
    """Where it is not certain which node is at fault: "test" (those that may be leave at once, are tested aside and return where
    nothing is found), or "keep" them. "auto" keeps virtual nodes of one machine, which share whatever may be at fault, and tests
    all others."""
    on_corruption: str = "roll back"
    """Where replicas differ that were equal: "roll back" to a checkpoint where they were, or "tell"."""
    check_nodes: str = "quick"
    """Whether nodes are checked before they train: "quick", or "off"."""
    shrink_after: Duration = Duration(10)
    """With --min-nodes: so long a node is waited for that may take a lost one's place, before the run goes on with fewer."""
    grow_after: Duration = Duration(60)
    """A smaller run stops for a node that is back once that has answered for so long: one that comes and goes stops it not at all."""
    grows_per_hour: int = 3
    """And so often within an hour: each costs a restart. Where the run is started again for another reason, it grows at once."""
    history: str = ""
    """The folder of the site's node history, which all runs share; "" for none."""

    def __post_init__(self) -> None:
        for name in ("stop_at", "cordon_at"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise UsageError(f"policy '{name}' must be a confidence from 0 to 1, not {value!r}")
        if self.check_nodes not in ("quick", "off"):
            raise UsageError(f'policy \'check_nodes\' must be "quick" or "off", not {self.check_nodes!r}')
        if self.on_doubt not in ("auto", "test", "keep"):
            raise UsageError(f'policy \'on_doubt\' must be "auto", "test" or "keep", not {self.on_doubt!r}')
        if self.on_corruption not in ("roll back", "tell"):
            raise UsageError(
                f'policy \'on_corruption\' must be "roll back" or "tell", not {self.on_corruption!r}'
            )
        for name in ("shrink_after", "grow_after"):
            try:
                object.__setattr__(self, name, Duration(getattr(self, name)))
            except (TypeError, ValueError):
                raise UsageError(f"policy '{name}' must be a duration, not {getattr(self, name)!r}") from None
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(
                    f"policy '{name}' must be finite and not negative, not {getattr(self, name)}"
                )
        for name in ("cordons_per_hour", "cordons_per_hour_and_cause", "grows_per_hour"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"policy '{name}' must be a whole number from 0 up, not {value!r}")


@dataclass(frozen=True)
class ClusterChoice:
    """Where a run's processes run (`--cluster NAME[,option=value...]`, `[cluster]` in run.toml). Which options there are,
    and what they may be, the cluster of that name says (`cluster.registry`)."""

    name: str = "local"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UsageError(f"the cluster's 'name' must be text, not {self.name!r}")
        for key, value in self.options.items():
            if not isinstance(value, str | int | float) and not (
                isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
            ):
                raise UsageError(
                    f"the cluster's '{key}' must be a text, a number, or a list of texts, not {value!r}"
                )
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items()}
        object.__setattr__(self, "options", plain)  # as run.toml gives them back


@dataclass(frozen=True)
class RunSpec:
    """What was asked."""

    command: tuple[str, ...]
    """The script and its arguments, as after `--`."""
    run_id: str
    """Marks every process of the run in its environment."""
    nodes: int = 1
    nproc: int = 1
    """Ranks per node."""
    spares: int = 0
    """Nodes kept ready to take a lost node's place."""
    min_nodes: int = 0
    """The run goes on with fewer nodes, down to so many, while none can take a lost one's place; 0: it waits for one."""
    nodes_per_replica: int = 1
    """How many nodes hold one copy of the model together: a run becomes smaller by whole ones."""
    cluster: ClusterChoice = field(default_factory=ClusterChoice)
    """Where its processes run."""
    ownership: str = "auto"
    """How processes are held so that none can escape: cgroup, parent or marks; auto takes the surest that works."""
    origin: str = ""
    """What the run was started from (--from), absolute; empty: from the beginning."""
    trust_pickle: bool = False
    """Whether pickled objects in `origin` may be read."""
    host_memory: Bytes = Bytes(0)
    """What each node's keeper may hold in memory for snapshots; 0 takes half of what is free."""
    record: str = "auto"
    """Where the record of the run lies: shared or own-disk (the run directory), an address; auto goes by the file system."""
    resume_arg: str = ""
    """What is added to the command from the second attempt on, `{}` for the newest checkpoint that the script wrote itself."""
    resume_from: str = ""
    """Where that lies: a pattern below the folder of the call; empty: in the attempts' own output folders."""
    keep_logs: Bytes = KEEP_LOGS
    """What the ranks' logs of all attempts may take together; the oldest go first, and of the newest two attempts the middle
    of the longest."""
    room_elsewhere: str = ""
    """A folder or address for the last checkpoint, where the storage refuses it even after `timeouts.room`."""
    warm: str = "auto"
    """Whether processes that have imported what the script imports wait for the next attempt: on, off, or auto, which is on."""
    warm_after: Duration = WARM_AFTER
    """How long after an attempt's first step they are made: importing takes a processor for seconds."""
    on_divergence: str = "auto"
    """What is done when the loss diverges: rollback, tell, or auto: rollback where a checkpoint tells its data position."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    budgets: Budgets = field(default_factory=Budgets)
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        for name, least in (
            ("nodes", 1),
            ("nproc", 1),
            ("spares", 0),
            ("min_nodes", 0),
            ("nodes_per_replica", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"'{name}' must be a whole number from {least} up, not {value!r}")
        if self.min_nodes and self.min_nodes not in self.node_counts:
            whole = [str(n) for n in range(1, self.nodes + 1) if not n % self.nodes_per_replica]
            raise UsageError(
                f"a run of {self.nodes} nodes, {self.nodes_per_replica} to a replica, cannot go on with {self.min_nodes}",
                hint=f"--min-nodes may be {', '.join(whole)}"
                if str(self.nodes) in whole
                else f"Make --nodes a multiple of --nodes-per-replica {self.nodes_per_replica}",
            )
        if self.ownership not in OWNERSHIPS:
            raise UsageError(f"'ownership' must be one of {', '.join(OWNERSHIPS)}, not {self.ownership!r}")
        if self.on_divergence not in ON_DIVERGENCE:
            raise UsageError(
                f"'on_divergence' must be one of {', '.join(ON_DIVERGENCE)}, not {self.on_divergence!r}"
            )
        if not isinstance(self.run_id, str) or not self.run_id:
            raise UsageError(f"'run_id' must be text, not {self.run_id!r}")
        if self.warm not in WARM:
            raise UsageError(f"'warm' must be one of {', '.join(WARM)}, not {self.warm!r}")
        try:
            object.__setattr__(self, "warm_after", Duration(self.warm_after))
        except (TypeError, ValueError):
            raise UsageError(f"'warm_after' must be a duration, not {self.warm_after!r}") from None
        if not 0 <= self.warm_after < math.inf:
            raise UsageError(f"'warm_after' must be finite and not negative, not {self.warm_after}")
        for name in ("host_memory", "keep_logs"):
            try:
                object.__setattr__(self, name, Bytes(getattr(self, name)))
            except (TypeError, ValueError):
                raise UsageError(f"'{name}' must be a size, not {getattr(self, name)!r}") from None

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc

    @property
    def node_counts(self) -> tuple[int, ...]:
        """With how many nodes the run may go on, the most first: whole replicas, from `nodes` down to `min_nodes`."""
        if not self.min_nodes:
            return (self.nodes,)
        if self.nodes % self.nodes_per_replica:
            return ()
        return tuple(range(self.nodes, self.min_nodes - 1, -self.nodes_per_replica))


def write_spec(run_dir: RunDir, spec: RunSpec, *, first: bool = False) -> bool:
    """Writes run.toml, whole; with `first` only where there is none yet. Returns whether it wrote."""
    lines = [
        "# What was asked of this run. Settings below may be changed between calls of `unbroken run`;",
        "# command, nodes, nproc and run_id belong to the run.",
    ]
    tables: list[tuple[str, Mapping[str, Any]]] = []
    for f in fields(spec):
        value = getattr(spec, f.name)
        if isinstance(value, ClusterChoice):
            tables.append((f.name, {"name": value.name, **value.options}))
        elif isinstance(value, (Timeouts, Budgets, Policy)):
            tables.append((f.name, {g.name: getattr(value, g.name) for g in fields(value)}))
        else:
            lines.append(f"{f.name} = {_toml(value)}")
    for name, table in tables:
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
    text = "\n".join(lines) + "\n"
    if first:
        return atomic.create_exclusive(run_dir.spec, text.encode())
    atomic.write_text(run_dir.spec, text)
    return True


def read_policy(path: Path) -> tuple[Policy, Budgets]:
    """Reads a policy.toml: its tables [policy] and [budgets], each key as in run.toml, what is missing by default. Raises InputError
    where it is no TOML, UnknownKey (naming the nearest), UsageError."""
    try:
        value = tomllib.loads(path.read_text())
    except OSError as e:
        raise InputError(f"the policy cannot be read: {e.strerror}", where=str(path)) from e
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise InputError(f"the policy cannot be read: {unreadable(e)}", where=str(path)) from e
    for key in value:
        if key not in ("policy", "budgets"):
            raise UnknownKey(key, ["policy", "budgets"], where=str(path))
    _take_tables(value, (("policy", Policy), ("budgets", Budgets)), str(path))
    return value["policy"], value["budgets"]


def read_spec(path: Path) -> RunSpec:
    """Reads run.toml. Raises InputError where it is no TOML, UnknownKey (naming the nearest), UsageError."""
    try:
        value = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("this is no run directory: it has no run.toml", where=str(path.parent)) from None
    except OSError as e:
        raise InputError(f"run.toml cannot be read: {e.strerror}", where=str(path)) from e
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise InputError(f"run.toml cannot be read: {unreadable(e)}", where=str(path)) from e
    try:
        return _spec_of(value, str(path))
    except UnknownKey:
        raise
    except UsageError as e:  # every check says what is wrong; here is where
        raise UsageError(e.message, where=e.where or str(path), hint=e.hint or "Fix the file") from None


def _spec_of(value: dict[str, Any], where: str) -> RunSpec:
    """The spec that a parsed run.toml says; of a run that began before there were other clusters, too."""
    before = value.pop("backend", "local")
    table = value.pop("cluster", {"name": before})
    if not isinstance(table, dict):
        raise UsageError("'cluster' must be a table", where=where)
    cluster = ClusterChoice(table.get("name", before), {k: v for k, v in table.items() if k != "name"})
    _check_keys(value, RunSpec, where)
    _take_tables(value, (("timeouts", Timeouts), ("budgets", Budgets), ("policy", Policy)), where)
    for key in ("command", "run_id"):
        if key not in value:
            raise UsageError(f"'{key}' is missing", where=where)
    command = value["command"]
    if not isinstance(command, list) or not command or not all(isinstance(c, str) for c in command):
        raise UsageError("'command' must be a list of strings", where=where)
    value["command"] = tuple(command)
    return RunSpec(**value, cluster=cluster)


def _take_tables(value: dict[str, Any], tables: tuple[tuple[str, Any], ...], where: str) -> None:
    """Puts the settings that each table says in its place."""
    for name, kind in tables:
        table = value.get(name, {})
        if not isinstance(table, dict):
            raise UsageError(f"'{name}' must be a table", where=where)
        _check_keys(table, kind, f"{where}, [{name}]")
        value[name] = kind(**table)


def check_same(old: RunSpec, new: RunSpec, run_dir: RunDir, *, amend: bool = False) -> None:
    """Raises RunDirMismatch, saying what differs, unless both describe the same run; with `amend` that may be with another
    command, nodes or ranks."""
    differ = []
    for key in () if amend else FIXED:
        if key != "run_id" and getattr(old, key) != getattr(new, key):
            differ.append(f"{key} was {_show(getattr(old, key))}, now {_show(getattr(new, key))}")
    if "auto" != new.record != old.record and "://" in new.record + old.record:
        differ.append(f"--record was {old.record}, now {new.record}")
    origin = bool(new.origin) and new.origin != old.origin
    if origin:
        differ.append(f"--from was {old.origin or 'not given'}, now {new.origin}")
    if differ:
        hint = (
            "Use the same command; --amend lets this run go on with other arguments, nodes or ranks; to try them beside it "
            f"start a new run: unbroken run --from {run_dir.path} --run-dir ANOTHER ..."
        )
        if amend and origin:
            hint = (
                "Leave --from and --fork-from out: a run that is there goes on from its own last step, with --amend too; to start "
                f"from that checkpoint begin a new run: unbroken run --from {new.origin} --run-dir ANOTHER ..."
            )
        raise RunDirMismatch(
            f"this run directory belongs to another command line: {'; '.join(differ)}",
            where=str(run_dir.path),
            hint=hint,
        )


def _check_keys(value: dict[str, Any], kind: Any, where: str) -> None:
    known = [f.name for f in fields(kind)]
    for key in value:
        if key not in known:
            raise UnknownKey(key, known, where=where)


def _toml(value: object) -> str:
    """A value as TOML. Raises UsageError for text that no TOML file can hold."""
    if isinstance(value, Duration):
        short, exact = f"{float(value):g}", repr(float(value))
        text = short if float(short) == float(value) else exact
        return exact if "e" in text else f'"{text}s"'
    if isinstance(value, Bytes):
        return str(int(value))
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{value!r} holds bytes that are no UTF-8 text", hint="Rename the file or argument"
            ) from None
        # JSON's escapes are TOML's, except that TOML knows no surrogates and takes no raw DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _show(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
