"""`unbroken doctor`: what this machine can do for a run, and what it lacks."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Finding:
    """One thing that was tried. `good` says whether it is as it should be; `text` what was found, and what to do."""

    name: str
    good: bool
    text: str


@app.command()
def doctor(
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check what this machine can do for unbroken: how processes are held, what the kernel tells, stacks, memory.

    Everything is tried, nothing is left behind. Exit code 0 whatever is found.
    """
    found = examine()
    if json_out:
        print(json.dumps({"findings": [asdict(f) for f in found]}))
        return
    width = max(len(f.name) for f in found)
    for f in found:
        print(f"{'ok' if f.good else 'lacks':<6} {f.name:<{width}}  {f.text}")


def examine() -> list[Finding]:
    """What was found, in the order of the screen."""
    from ...detect.stacks.collecting import find_py_spy
    from ...machine import available_memory, usable_cpus
    from ...units import Bytes

    stacks = find_py_spy()
    memory = available_memory()
    return [
        _ownership(),
        _kernel_log(),
        Finding(
            "stacks", stacks is not None, stacks or "py-spy is not installed: a hang shows no Python stacks"
        ),
        *_more(),
        Finding("memory", True, f"{Bytes(memory)} free" if memory is not None else "not known"),
        Finding("processors", True, f"{usable_cpus()} usable"),
    ]


def _ownership() -> Finding:
    """How the processes of a run started here would be held."""
    from ...cluster import Kind
    from ...cluster.local_events import LocalCluster

    cluster = LocalCluster(f"doctor{secrets.token_hex(4)}")
    text = cluster.describe_holding()
    if cluster.owner.kind is not Kind.CGROUP:
        text += ". A cgroup is surer: run as root, or in `systemd-run --user --scope -p Delegate=yes`"
    return Finding("processes", cluster.owner.kind is not Kind.MARKS, f"held by {text}")


def _kernel_log() -> Finding:
    from ...recover.node.ranks.kernel_log import KernelLog

    log = KernelLog()
    if log.has_killed(0) is None:
        return Finding("kernel log", False, f"{log.why_not}: a kill for memory cannot be told from another")
    return Finding("kernel log", True, "/dev/kmsg can be read: kills for memory are known")


def _more() -> list[Finding]:
    """What is missing for which feature."""
    return [_bytecode(), *_gpus(), _ptrace(), _memlock(), _clock(), _shared_memory()]


def _bytecode() -> Finding:
    """Whether what a rank imports is compiled: without it each start compiles again."""
    import importlib.util
    import os

    lacking = []
    for name in ("unbroken", "torch"):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            continue
        cache = Path(importlib.util.cache_from_source(found.origin))
        if not cache.exists() and not os.access(
            cache.parent if cache.parent.exists() else Path(found.origin).parent, os.W_OK
        ):
            lacking.append(name)
    if lacking:
        text = f"{', '.join(lacking)} has no bytecode and none can be written: each start takes seconds longer. Run `python -m compileall` once as its owner"
        return Finding("bytecode", False, text)
    return Finding("bytecode", True, "what ranks import is compiled, or will be at the first start")


def _gpus() -> list[Finding]:
    from ...detect.node.whole import open_nvml

    nvml, why = open_nvml()
    if nvml is None:
        return [Finding("gpus", False, f"{why}: no health of GPUs, no GPU utilisation, no XIDs by NVML")]
    return [Finding("gpus", True, f"{nvml.nvmlDeviceGetCount()} by NVML"), describe_counters(nvml)]


def describe_counters(nvml: Any) -> Finding:
    """Whether the GPUs' counters can be read, which say who makes a training slow where its script does not. `nvml` is the `pynvml` module or its fake."""
    from ...errors import UnbrokenError
    from ...recover.node.ranks.counters import open_counters

    count, whys = nvml.nvmlDeviceGetCount(), []
    for i in range(count):
        try:
            open_counters(nvml, nvml.nvmlDeviceGetHandleByIndex(i)).close()
        except (UnbrokenError, AttributeError, nvml.NVMLError) as e:
            whys.append(str(e))
    if whys:
        text = f"{len(whys)} of {count} GPUs have no counters ({whys[0]}): who makes a training slow is told only where its script gives `run.step(busy=)`"
        return Finding("gpu counters", False, text)
    return Finding("gpu counters", True, "can be read: slow ranks are told without a line in the script")


def _ptrace() -> Finding:
    """Whether stacks of processes that are no children of ours may be read."""
    import os

    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    try:
        level = int(scope.read_text())
    except (OSError, ValueError):
        level = 0
    if level == 0 or os.geteuid() == 0 or level == 1:
        note = "" if level == 0 or os.geteuid() == 0 else " (of processes that we started)"
        return Finding("ptrace", True, f"native and Python stacks can be read{note}")
    return Finding(
        "ptrace",
        False,
        f"ptrace_scope is {level}: a hang shows no stacks. Set it to 1, or give CAP_SYS_PTRACE",
    )


def _memlock() -> Finding:
    import resource

    from ...units import Bytes

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    least = 1 << 30
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", True, "unlimited")
    good = soft >= least
    hint = "" if good else ": InfiniBand and pinned buffers may be refused. Set `ulimit -l unlimited`"
    return Finding("memlock", good, f"{Bytes(soft)}{hint}")


def _clock() -> Finding:
    from ...detect.node.clock import check_clock
    from ...detect.node.result import State

    found = check_clock()
    good = found.state is State.GOOD
    hint = (
        ""
        if good
        else ": which node failed first is told by measured offsets all the same; logs of other tools may mislead"
    )
    return Finding("clock", good, f"{found.text}{hint}")


def _shared_memory() -> Finding:
    from ...detect.node.files import check_shared_memory
    from ...detect.node.result import State

    found = check_shared_memory()
    hint = (
        ""
        if found.state is State.GOOD
        else ": data loaders and NCCL fail there. In a container: --shm-size=16g"
    )
    return Finding("shared memory", found.state is State.GOOD, f"{found.text}{hint}")
