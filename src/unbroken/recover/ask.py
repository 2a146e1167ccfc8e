"""Asks the live supervisor of a run what no file says: a disk that is full takes no note of it either."""

from __future__ import annotations

import asyncio

from ..errors import UnbrokenError
from ..progress import RunDir, Term, read_terms
from ..waiting import wait_within
from .amend import read_run_secret
from .supervise.launch.takeover import reach_supervisor

_ANSWER_S = 2.0


def ask_waits(run_dir: RunDir) -> str:
    """What the run waits for, in words; "" where that is nothing, or its supervisor does not say it within two seconds (an
    earlier version's, say)."""
    try:
        terms = read_terms(run_dir)
        return asyncio.run(wait_within(_ask(run_dir, terms[-1]), _ANSWER_S)) if terms else ""
    except (OSError, TimeoutError, UnbrokenError):
        return ""


async def _ask(run_dir: RunDir, term: Term) -> str:
    async with reach_supervisor(term, read_run_secret(run_dir)) as link:
        if link is None:
            return ""
        answer = await link.call("waits", timeout=_ANSWER_S)
        return str(answer.get("waits", ""))
