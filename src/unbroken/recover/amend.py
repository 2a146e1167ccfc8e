"""Asks the live supervisor of a run for other arguments, and waits until its ranks have made a step with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..link.secret import Secret
from ..link.tls import Identity
from ..progress import RunDir, RunSpec, Term
from ..progress.records.amendment import describe_difference
from ..progress.records.state import RunState
from .record.base import Record
from .supervise.launch.takeover import reach_supervisor
from .wire import read_token

_ANSWER_S = 30.0
_POLL_S, _POLL_SLOW_S = 0.2, 2.0
_NO_STEPS_S = 120.0
"""So long after the start of an attempt a run that never told a step is taken for one that tells none."""
_PROGRESS = ("first_step", "stepped", "durable")
"""Records of an attempt that has made a step."""
_AGAIN = "`unbroken status` shows what the run has now; give the amended command again"


async def amend_live(run_dir: RunDir, record: Record, wanted: RunSpec, say: Callable[[str], None]) -> bool:
    """Whether a live supervisor took the spec's command for its next attempt, which has made a step by then; False where none
    answers.

    Raises RunError where it refuses, where another amendment comes first, or where the attempt or the run ends before that step;
    UnsafeFile and OSError where the run's key files cannot be read.
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
    await _wait_for_step(record, term, answer.get("request", ""), before, run_dir.path, say)
    return True


@dataclass(frozen=True)
class AmendmentProgress:
    """How far an amendment is. `done` says in words that a step was made with it, `failed` why none will be; without either
    it is waited for, and `news` says for what, "" for nothing new."""

    done: str = ""
    failed: str = ""
    hint: str = ""
    news: str = ""


def read_progress(
    records: Sequence[dict[str, Any]], request: str, before: int = 0, *, now: float = 0.0
) -> AmendmentProgress:
    """What a journal says of an amendment that a supervisor took as `request`; of an earlier version's supervisor that is "", and
    it had written down `before` amendments until then. `now` is in seconds since the epoch."""
    state = RunState.of(records)
    numbers = [i for i, r in enumerate(state.amended) if r.get("request") == request] if request else [before]
    mine, later = (state.amended[numbers[0] :] + [None, None])[:2] if numbers else (None, None)
    ended = state.status in ("completed", "stopped", "interrupted")
    why = f": {state.why}" if state.why else ""
    if request and any(r["kind"] == "amend_replaced" and r["request"] == request for r in records):
        has_begun = mine is not None and state.attempt >= int(mine["before"])
        before_what = "its first step" if has_begun else "any attempt ran with it"
        return AmendmentProgress(failed=f"replaced by another --amend, before {before_what}", hint=_AGAIN)
    if mine is None:
        failed = f"the run is {state.status} before it could be amended{why}" if ended else ""
        return AmendmentProgress(failed=failed, hint="Give the amended command again: it goes on with it")
    first = int(mine["before"])
    last = int(later["before"]) - 1 if later is not None else state.attempt
    ours = [r for r in records if first <= int(r.get("attempt") or 0) <= last]
    if any(_shows_step(r) for r in ours):
        return AmendmentProgress(done=_describe_start(ours, mine))
    if later is not None:
        if later.get("back"):
            difference = describe_difference(later["was"], later["command"])
            failed = f"attempt {last} failed before its first step, and the run goes back to the command before ({difference}): {later.get('why')}"
            return AmendmentProgress(
                failed=failed, hint=f"{_AGAIN} once the cause is fixed; the run goes on without it"
            )
        return AmendmentProgress(failed="replaced by another --amend, before its first step", hint=_AGAIN)
    if ended:
        done = any(r["kind"] == "ended" and r.get("how") == "completed" for r in ours)
        if done:
            return AmendmentProgress(done=f"attempt {last} ran with them, and the run is completed")
        return AmendmentProgress(
            failed=f"the run is {state.status} before the first step with them{why}",
            hint="Fix the cause and give the amended command again: the run goes on from its last checkpoint",
        )
    begun = [r for r in ours if r["kind"] == "attempt"]
    if not begun:
        return AmendmentProgress()
    number = int(begun[-1]["attempt"])
    told = any(r["kind"] == "first_step" for r in records) or state.step >= 0
    if not told and now - float(begun[-1]["t"]) > _NO_STEPS_S:
        return AmendmentProgress(
            done=f"attempt {number} runs with them; this run has told no step so far, so whether it trains is not known"
        )
    lost = [r for r in ours if r["kind"] == "incident" and r.get("action") != "none"]
    after = f" again, since it failed before its first step ({lost[-1].get('why')})" if lost else ""
    return AmendmentProgress(
        news=f"attempt {number} starts with them{after}; waiting for its first step (Ctrl-C ends this wait alone)"
    )


def _shows_step(r: dict[str, Any]) -> bool:
    """Whether a record of an attempt tells that it has made a step."""
    return r["kind"] in _PROGRESS or (r["kind"] == "seal" and bool(r["checkpoints"] or r.get("memory")))


def _describe_start(ours: Sequence[dict[str, Any]], mine: dict[str, Any]) -> str:
    """From where the attempt that made the first step went on."""
    progress = next(r for r in ours if _shows_step(r))
    number = int(progress["attempt"])
    restored = [r for r in ours if r["kind"] == "restored" and int(r["attempt"]) == number]
    step = next((int(r["step"]) for r in ours if r["kind"] == "first_step" and r["attempt"] == number), None)
    first = f": its first step is {step}" if step is not None else ""
    if restored and restored[-1].get("step") is not None:
        return f"attempt {number} runs with them, from step {restored[-1]['step']}, which it restored{first}"
    # A script may go on from a checkpoint of its own, of which nobody tells us here.
    if (restored or int(mine.get("step", -1)) < 0) and (step is None or step <= 1):
        return f"attempt {number} runs with them, from the beginning{first}"
    return f"attempt {number} runs with them{first}"


async def _wait_for_step(
    record: Record, term: Term, request: str, before: int, where: Path, say: Callable[[str], None]
) -> None:
    said = ""
    while True:
        records = (await asyncio.to_thread(record.read)).records
        found = read_progress(records, request, before, now=time.time())
        if found.done:
            say(found.done)
            return
        if found.failed:
            raise RunError(found.failed, where=str(where), hint=found.hint)
        if found.news not in ("", said):
            said = found.news
            say(said)
        if term.supervisor_is_gone():
            raise RunError(
                f"its supervisor, process {term.pid} on {term.host}, ended meanwhile", where=str(where),
                hint="Give the amended command again: it takes over with it",
            )  # fmt: skip
        await asyncio.sleep(_POLL_SLOW_S if record.slow else _POLL_S)


def read_run_secret(run_dir: RunDir) -> Secret:
    """What the run's processes show each other. Raises UnsafeFile, OSError."""
    identity = Identity.read(run_dir.identity) if run_dir.identity.exists() else None
    return Secret(read_token(run_dir), identity)
