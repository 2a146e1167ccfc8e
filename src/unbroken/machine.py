"""What this process may use of its machine: CPUs (cgroup v2), memory (v2 or v1). No torch, no psutil."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def python_path() -> str:
    """PYTHONPATH for a process that is to import what this one can, wherever it starts: also what was only put into
    sys.path, relative entries as absolute ones, and this package from where it was imported."""
    own = str(Path(__file__).resolve().parents[1])
    entries = [os.path.abspath(p) for p in sys.path if isinstance(p, str) and p and os.pathsep not in p]
    if own not in entries:
        entries.insert(0, own)
    return os.pathsep.join(dict.fromkeys(entries))


def usable_cpus() -> int:
    """CPUs that this process may use: affinity and cgroup quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (CGROUPS / "cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2, or no limit in it
    return count


def usable_memory() -> int:
    """Bytes of memory that this process could ever use: the machine's, or the tightest limit of its cgroups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _, _ in _limits(PROC, CGROUPS))])


def available_memory() -> int | None:
    """Bytes that can still be allocated here: the smaller of the machine's and the cgroup's; None if unknown."""
    found = [n for n in (meminfo("MemAvailable"), cgroup_headroom()) if n is not None]
    return max(0, min(found)) if found else None


def cgroup_headroom(proc: Path = PROC, mounted: Path = CGROUPS) -> int | None:
    """Bytes until the tightest memory limit above this process; None without a limit.

    Page cache counts as used but is given back on demand, so it is left out.
    """
    return min(
        (limit - used + spare for limit, used, spare in _limits(proc, mounted) if used is not None),
        default=None,
    )


def find_kill_count(pid: int, processes: Path = Path("/proc"), mounted: Path = CGROUPS) -> Path | None:
    """The file in which the kernel counts what it kills for memory in this process's cgroup; None where there is none.

    Source: Documentation/admin-guide/cgroup-v2.rst (`oom_kill` of memory.events), and of version 1 memory.oom_control.
    """
    for here, root, v2 in _memory_groups(processes / str(pid) / "cgroup", mounted):
        if ".." in here.parts:
            continue  # another container's, of which nothing is mounted here
        # Version 2 has it where the controller is on, and counts what lies below too.
        for level in [here, *here.parents] if v2 else [here]:
            found = level / ("memory.events" if v2 else "memory.oom_control")
            if read_kill_count(found) is not None:
                return found
            if level == root:
                break
    return None


def read_kill_count(path: Path) -> int | None:
    """How many processes were killed, by the file of `find_kill_count`; None where it does not say."""
    try:
        return next(int(x.split()[1]) for x in path.read_text().splitlines() if x.split()[:1] == ["oom_kill"])
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def read_kernel_log(log: int, within_s: float) -> Iterator[bytes | None]:
    """The records of an open /dev/kmsg from where it stands to its end; None in place of those that were overwritten before they
    were read. Raises OSError, TimeoutError where that takes longer than `within_s`.

    Source: Documentation/ABI/testing/dev-kmsg: one record a read; EPIPE where it was overwritten, EAGAIN at the end.
    """
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            record = os.read(log, 8192)
        except BlockingIOError:
            return
        except BrokenPipeError:
            yield None
            continue
        if not record:
            return
        yield record
    raise TimeoutError(f"the kernel's log could not be read to its end in {within_s:.0f} s")


def meminfo(key: str) -> int | None:
    """Bytes of a line of /proc/meminfo; None if it is not there."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _limits(proc: Path, mounted: Path) -> Iterator[tuple[int, int | None, int]]:
    """(limit, used, of which page cache) of each cgroup above this process that has a memory limit."""
    for here, root, v2 in _memory_groups(proc, mounted):
        names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for level in [here, *here.parents]:
            limit = _number(level / names[0])
            if limit is not None and limit < 2**60:
                yield limit, _number(level / names[1]), _reclaimable(level / "memory.stat")
            if level == root:
                break


def _memory_groups(proc: Path, mounted: Path) -> Iterator[tuple[Path, Path, bool]]:
    """(folder, the tree's root, whether it is version 2) of a process's cgroup in each tree that may account memory."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not controllers:
            yield mounted / path.lstrip("/"), mounted, True
        elif "memory" in controllers.split(","):
            yield mounted / "memory" / path.lstrip("/"), mounted / "memory", False


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # "max", or not there


def _reclaimable(path: Path) -> int:
    """Page cache that the kernel gives back under pressure."""
    try:
        rows = dict(line.split() for line in path.read_text().splitlines())
        # v1 counts this group alone, unless it says total; v2 always counts those below too.
        return sum(int(rows.get(f"total_{k}", rows.get(k, 0))) for k in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return 0
