"""Claims a run for a supervisor, and never for two."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from ....errors import RunError, RunInUse
from ....link.address import Address
from ....link.bounds import Malformed
from ....link.secret import Secret
from ....progress import RunDir, Term
from ...record.base import Record
from ...room import is_full, unwritable
from ...wire import Link, Message

_log = logging.getLogger("unbroken.supervisor")
_PROBE_S = 3.0
_RETRY_S = 0.5
Connect = Callable[..., Awaitable[Link]]


async def take_over(
    record: Record,
    run_dir: RunDir,
    run_id: str,
    address: Address,
    secret: Secret,
    connect: Connect = Link.connect,
    stopped: Callable[[], bool] = bool,
) -> tuple[Term, Term | None]:
    """Claims the next term; returns it and its predecessor.

    A predecessor that is provably gone is succeeded at once. One that answers holds the run: RunInUse. One that
    neither is gone nor answers (stopped, or cut off) is succeeded too: agents obey the higher term, and what it
    writes into its journal from here on does not count.

    While the disk of a run that goes on is full it waits for room, until a stop is asked for (`stopped`): StorageError.
    """
    terms = await asyncio.to_thread(record.terms)
    before = terms[-1] if terms else None
    if before is not None and not before.supervisor_is_gone() and await _answers(before, secret, connect):
        raise RunInUse(
            "a live supervisor holds this run directory",
            where=f"{record.where}, process {before.pid} on {before.host}",
            hint=f"Watch it with `unbroken status {run_dir.path}`, or stop it first (kill -TERM {before.pid})",
        )
    number = (before.number if before else 0) + 1
    sealed = await asyncio.to_thread(record.seal, terms)
    told = False
    while True:
        try:
            mine = await asyncio.to_thread(
                lambda: record.claim(number, run_id=run_id, address=str(address), sealed=sealed)
            )
            break
        except OSError as e:
            # A disk that fills up just now: nothing has been claimed, and a run that goes on must not be left alone for it.
            if before is None or not is_full(e) or stopped():
                raise unwritable(run_dir, e) from e
            if not told:
                _log.warning(
                    "the run cannot be claimed (%s); waiting for room in %s", e.strerror, record.where
                )
                told = True
            await asyncio.sleep(_RETRY_S)
    if mine is None:
        raise RunInUse("another supervisor claimed this run directory at the same moment", where=record.where)
    return mine, before


async def _answers(term: Term, secret: Secret, connect: Connect) -> bool:
    if not isinstance(term.address, str):
        # It is of an earlier version, whose links were plain: nobody is asked over one. It ran on one machine.
        return term.supervisor_runs_here()
    async with reach_supervisor(term, secret, connect) as link:
        return link is not None


@asynccontextmanager
async def reach_supervisor(
    term: Term, secret: Secret, connect: Connect = Link.connect
) -> AsyncIterator[Link | None]:
    """A link to this term's supervisor, where it answers and each has shown the other that it knows the run's token;
    else None."""

    async def nothing(_: Message) -> None:
        return None

    if not isinstance(term.address, str):
        yield None
        return
    try:
        address = Address.parse(term.address)
        link = await connect(address, nothing, secret.identity, timeout=_PROBE_S)
    except (OSError, TimeoutError, Malformed):
        yield None
        return
    serving = asyncio.create_task(link.serve())
    try:
        try:
            answer = await link.introduce(secret.token, address, timeout=_PROBE_S)
            known = answer.get("run_id") == term.run_id
        except (RunError, TimeoutError):
            known = False
        yield link if known else None
    finally:
        link.close()
        await serving
