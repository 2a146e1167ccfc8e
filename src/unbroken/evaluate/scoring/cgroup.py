"""A control group for one sandbox: the one limit that counts all memory, whoever holds it and however.

Pages of memfds, tmpfs, pipes and sockets belong to no process that /proc shows; a control group counts them. It can be
made as root, and by a user where the system has delegated a part of the tree to them (systemd does for user services).
Both hierarchies are known: version 2, and the memory and pids controllers of version 1.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PREFIX = "unbroken-sandbox-"
SPARE_PROCESSES = 8
"""Beside the command's own: bubblewrap, the shell that joins, the first process inside."""
_REMOVE_S = 2.0


@dataclass(frozen=True)
class CgroupParents:
    """Where groups can be made; one folder in version 2, one for each controller in version 1."""

    version: int
    memory: Path
    pids: Path | None


@dataclass(frozen=True)
class Group:
    """One sandbox's group. Join it by writing 0 to each of `joins`."""

    version: int
    folders: tuple[Path, ...]

    @property
    def joins(self) -> tuple[str, ...]:
        """The files through which a process puts itself into the group."""
        return tuple(str(f / "cgroup.procs") for f in self.folders)

    def ran_out(self) -> bool:
        """Whether the kernel killed a process of it because its memory was used up."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        try:
            lines = (self.folders[0] / name).read_text().splitlines()
        except OSError:
            return False
        return any(line.startswith("oom_kill ") and int(line.split()[1]) > 0 for line in lines)

    def remove(self) -> None:
        """Removes it; its processes are dying. What cannot be removed in time is left to `sweep`."""
        deadline = time.monotonic() + _REMOVE_S
        for folder in self.folders:
            while not _removed(folder) and time.monotonic() < deadline:
                time.sleep(0.005)


def parents() -> CgroupParents | str:
    """Where a group can be made, tried out once a process; or why nowhere."""
    return _tried(os.geteuid())


@cache
def _tried(_: int) -> CgroupParents | str:
    found, why = _places(), "this machine has no control groups with a memory controller"
    for place in found:
        sweep(place)
        try:
            make(place, memory=64 << 20, processes=16).remove()
            return place
        except OSError as e:
            why = f"{e.filename}: {e.strerror}"
    return why


def make(place: CgroupParents, *, memory: int, processes: int) -> Group:
    """A new group with these limits. Raises OSError."""
    name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    folders = [place.memory / name] + ([place.pids / name] if place.pids not in (None, place.memory) else [])
    made: list[Path] = []
    try:
        for folder in folders:
            folder.mkdir()
            made.append(folder)
        if place.version == 2:
            _write(folders[0] / "memory.max", memory)
            _try(folders[0] / "memory.swap.max", 0)
            _try(folders[0] / "memory.oom.group", 1)
        else:
            _write(folders[0] / "memory.limit_in_bytes", memory)
            _try(folders[0] / "memory.memsw.limit_in_bytes", memory)
            _try(folders[0] / "memory.swappiness", 0)
        if place.pids is not None:
            _write(folders[-1] / "pids.max", processes + SPARE_PROCESSES)
        for folder in folders:
            if not os.access(folder / "cgroup.procs", os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError:
        for folder in made:
            _removed(folder)
        raise
    return Group(place.version, tuple(folders))


def sweep(place: CgroupParents) -> None:
    """Removes the groups of processes that are gone."""
    for folder in {place.memory, place.pids or place.memory}:
        for old in folder.glob(f"{PREFIX}*-*"):
            pid = old.name.removeprefix(PREFIX).partition("-")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                _removed(old)


def _places() -> list[CgroupParents]:
    """Folders of the hierarchy in which groups might be made, the likeliest first."""
    own = _own()
    found: list[CgroupParents] = []
    if (here := own.get("")) is not None:
        # A group that has processes can have no children with limits (but the root), so ours would be its sibling;
        # not where a limit is set on our own group: a sibling would be outside of it.
        for folder in (here, here.parent):
            control = _read(folder / "cgroup.subtree_control").split()
            if "memory" not in control or (folder != here and _read(here / "memory.max") not in ("max", "")):
                continue
            found.append(CgroupParents(2, folder, folder if "pids" in control else None))
    if (memory := own.get("memory")) is not None:
        found.append(CgroupParents(1, memory, own.get("pids")))
    return found


def _own() -> dict[str, Path]:
    """Controller -> the folder of our own group; "" for version 2."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), (right.split(" ", 2) + ["", ""])[:3]
        if kind == "cgroup2":
            mounts[""] = (fields[4], fields[3])
        elif kind == "cgroup":
            mounts |= dict.fromkeys(options.split(","), (fields[4], fields[3]))
    found: dict[str, Path] = {}
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            if name in mounts:
                point, root = mounts[name]
                inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else path
                found[name] = Path(point + "/" + inside.lstrip("/"))
    return {n: p for n, p in found.items() if p.is_dir()}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _write(path: Path, value: int) -> None:
    path.write_text(str(value))


def _try(path: Path, value: int) -> None:
    try:
        _write(path, value)
    except OSError:
        pass  # a kernel without it, or without swap


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
