"""Asks the live supervisor of a run for other arguments, and waits until its ranks run with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ..errors import RunError
from ..link.secret import Secret
from ..link.tls import Identity
from ..progress import RunDir, RunSpec, Term
from ..progress.records.state import RunState
from .record.base import Record
from .supervise.launch.takeover import reach_supervisor
from .wire import read_token

_ANSWER_S = 30.0
_POLL_S = 0.2


async def amend_live(run_dir: RunDir, record: Record, wanted: RunSpec, say: Callable[[str], None]) -> bool:
    """Whether a live supervisor took the spec's command for its next attempt, which runs by then; False where none answers.

    Raises RunError where it refuses, or the run ends instead; UnsafeFile and OSError where the run's key files cannot be read.
    """
    terms = await asyncio.to_thread(record.terms)
    if not terms or terms[-1].supervisor_is_gone():
        return False
    term = terms[-1]
    async with reach_supervisor(term, read_run_secret(run_dir)) as link:
        if link is None:
            return False
        before = len(RunState.of((await asyncio.to_thread(record.read)).records).amended)
        answer = await link.call(
            "amend", command=list(wanted.command), nodes=wanted.nodes, nproc=wanted.nproc, timeout=_ANSWER_S
        )
    where = f"process {term.pid} on {term.host}"
    if not answer.get("changes"):
        say(f"the run has these arguments already ({where} supervises it)")
        return True
    say(f"{where} supervises the run, and takes them at its next step boundary: {answer['changes']}")
    await _wait_for_attempt(record, term, before, int(answer["attempt"]), run_dir.path, say)
    return True


async def _wait_for_attempt(
    record: Record, term: Term, before: int, attempt: int, where: Path, say: Callable[[str], None]
) -> None:
    while True:
        state = RunState.of((await asyncio.to_thread(record.read)).records)
        if len(state.amended) > before and state.attempt > attempt:
            say(f"attempt {state.attempt} runs with them, from step {state.step}")
            return
        if state.status in ("completed", "stopped", "interrupted"):
            raise RunError(
                f"the run is {state.status} before it could be amended" + (f": {state.why}" if state.why else ""),
                where=str(where), hint="Give the amended command again: it goes on with it",
            )  # fmt: skip
        if term.supervisor_is_gone():
            raise RunError(
                f"its supervisor, process {term.pid} on {term.host}, ended meanwhile", where=str(where),
                hint="Give the amended command again: it takes over with it",
            )  # fmt: skip
        await asyncio.sleep(_POLL_S)


def read_run_secret(run_dir: RunDir) -> Secret:
    """What the run's processes show each other. Raises UnsafeFile, OSError."""
    identity = Identity.read(run_dir.identity) if run_dir.identity.exists() else None
    return Secret(read_token(run_dir), identity)
