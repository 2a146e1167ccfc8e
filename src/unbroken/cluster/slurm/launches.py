"""The sruns of a run's agents on the supervisor's host: started, followed by what they print, found again by a successor.

Each launch has two files in the run's volatile folder here: `TOKEN.json` says which srun it is, `TOKEN.events` takes what the
node's program prints. An srun outlives the supervisor that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import atomic
from ...link.secret import as_input
from ...private import private_folder
from ..holding.processes import read_stat
from ..local import find_root, open_log

_LINES_MOST = 1 << 20


@dataclass
class Launch:
    """One srun. `ended` is its exit code once it has ended, -1 where nobody can tell it any more; `began` says that its
    agent was started, `told` that the end of that was reported, `closing` that somebody finds out how it ended."""

    name: str
    node: str
    step: str
    pid: int
    started: int
    events: Path
    process: subprocess.Popen[bytes] | None = None
    ended: int | None = None
    began: bool = False
    told: bool = False
    closing: bool = False
    offset: int = field(default=0, repr=False)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.ended is None:
            if self.process is not None:
                self.ended = self.process.poll()
            elif not _lives(self.pid, self.started):
                self.ended = -1
        return self.ended

    def read(self) -> Iterator[Mapping[str, Any]]:
        """What its node's program has said since the last call; a line that is not whole waits."""
        with contextlib.suppress(FileNotFoundError), open(self.events, "rb") as f:
            f.seek(self.offset)
            data = f.read(_LINES_MOST)
            whole = data[: data.rfind(b"\n") + 1]
            self.offset += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):
                    if isinstance(said := json.loads(line), dict):
                        yield said

    def kill(self) -> None:
        """Ends the srun; its step may go on."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            if self.process is not None:
                self.process.wait()


class Launches:
    """All that this host knows of."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.folder = find_root(f"{run_id}-slurm")
        self.live: dict[str, Launch] = {}
        """By name: those whose srun has not ended, or was not reported yet."""
        self._names: set[str] = set()

    @property
    def prefix(self) -> str:
        """How the names of this run's agent steps begin."""
        return f"ub-{self.run_id}-"

    def is_ours(self, step: str) -> bool:
        """Whether a step of that name is this run's."""
        return step.startswith((self.prefix, name_other(self.run_id, "")))

    def make_name(self, node: str) -> tuple[str, str]:
        """The name of a new launch, and of its step."""
        token = secrets.token_hex(4)
        return f"{node}/{token}", f"{self.prefix}{token}"

    def name_of_step(self, step: str, node: str) -> str:
        """The launch that a step of this name is."""
        return f"{node}/{step.removeprefix(self.prefix)}"

    def spawn(
        self,
        name: str,
        step: str,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        secret: bytes,
        log: Path | None,
    ) -> Launch:
        """Starts an srun. Blocks for milliseconds; raises OSError."""
        self._names.add(name)  # first: its step may be listed before this returns
        private_folder(self.folder)
        events = self.folder / f"{name.rpartition('/')[2]}.events"
        with (
            open(events, "wb") as out,
            open_log(log) as err,
            as_input(secret) as given,
        ):
            process = subprocess.Popen(
                argv, env=dict(env), cwd="/", stdin=given, stdout=out, stderr=err, start_new_session=True
            )
        launch = Launch(name, node, step, process.pid, _start_time(process.pid), events, process)
        atomic.write_json(
            events.with_suffix(".json"),
            {"name": name, "node": node, "step": step, "pid": launch.pid, "started": launch.started},
            durable=False,
        )
        self.live[name] = launch
        return launch

    def was_here(self, name: str) -> bool:
        """Whether this srun ran on this host: then its step, which the controller may still list, tells nothing new."""
        return name in self._names

    def find_running(self) -> None:
        """Takes over the sruns that an earlier supervisor of this host has started, and forgets those that have ended."""
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else ():
            try:
                value = json.loads(path.read_text())
                launch = Launch(events=path.with_suffix(".events"), **value)
            except (OSError, ValueError, TypeError):
                continue
            if launch.name in self.live:
                continue
            if launch.poll() is None:
                self.live[launch.name] = launch
                self._names.add(launch.name)
                for said in launch.read():
                    launch.began |= said.get("kind") == "started"
                    launch.told |= said.get("kind") in ("exited", "refused")
            else:
                self._remove(launch)

    def find_running_on(self, node: str) -> Launch | None:
        """The launch of a node whose agent has not ended, as far as was heard."""
        running = (x for x in self.live.values() if x.node == node and not x.told and x.poll() is None)
        return next(running, None)

    def forget(self, launch: Launch) -> None:
        """It has ended, and that was reported."""
        self.live.pop(launch.name, None)
        self._remove(launch)

    def _remove(self, launch: Launch) -> None:
        for path in (launch.events, launch.events.with_suffix(".json")):
            path.unlink(missing_ok=True)
        self.tidy()

    def tidy(self) -> None:
        """Removes the folder where nothing is left in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def name_other(run_id: str, what: str) -> str:
    """The name of a run's step that is no agent's."""
    return f"ub-{run_id}.{what}"


def _start_time(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return read_stat(pid)[1]
    return 0


def _lives(pid: int, started: int) -> bool:
    try:
        state, since = read_stat(pid)
    except (OSError, ValueError, IndexError):
        return False
    return state not in "ZX" and since == started
