"""A hold: somebody (a watch that evaluates each checkpoint) wants every committed checkpoint kept until it has had it.

A pin is on one checkpoint, and can only be taken once that is there; with a short interval and `keep_last = 3` it may be
gone by then. A hold is one file at the folder's top that retention obeys for whatever is committed while it lasts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ...errors import UnbrokenError, UsageError
from ...journal.checksummed import decode_checked, encode_checked
from ..storage.base import Storage
from .contents import Found

FOLDER = "watchers"
SKEW_S = 60.0
"""By how much the clocks of two nodes may differ before a hold is misread."""
_KIND = "unbroken.checkpoint.hold"
_HOLDER = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True)
class Hold:
    """Who holds, until when (Unix seconds), and the checkpoints that it has had or does without."""

    holder: str
    until: float
    done: frozenset[str] = frozenset()
    why: str = ""


def take_hold(storage: Storage, hold: Hold) -> None:
    """Keeps whatever is committed, but what is `done`; again by the same holder: replaces it. Raises StorageError."""
    if not _HOLDER.fullmatch(hold.holder):
        raise UsageError(f"'{hold.holder}' cannot hold checkpoints", hint="Use up to 100 letters, digits, '.', '_' or '-'")  # fmt: skip
    body = {"holder": hold.holder, "until": hold.until, "why": hold.why, "done": sorted(hold.done)}
    storage.put(f"{FOLDER}/{hold.holder}.json", encode_checked(_KIND, body))


def end_hold(storage: Storage, holder: str) -> None:
    """Gives it back; no error if it is not there."""
    storage.delete(f"{FOLDER}/{holder}.json")


def holds(storage: Storage, *, now: float | None = None) -> list[Hold]:
    """Those that are not over. One that cannot be read is no hold: it would keep everything for ever."""
    now = time.time() if now is None else now
    found = []
    for file in storage.list(FOLDER):
        if not file.endswith(".json"):
            continue
        try:
            f = decode_checked(storage.read(f"{FOLDER}/{file}"), _KIND, where=file)
            hold = Hold(f.text("holder"), f.number("until"), frozenset(f.texts("done")), f.text("why"))
        except (FileNotFoundError, UnbrokenError):
            continue
        if hold.until + SKEW_S > now:
            found.append(hold)
    return found


def held_by(found: Iterable[Found], taken: Collection[Hold]) -> dict[str, str]:
    """{name: why} of the committed checkpoints that a hold keeps."""
    return {
        f.name: f"held by {h.holder}" + (f" ({h.why})" if h.why else "")
        for f in found
        for h in taken
        if f.committed and f.name not in h.done
    }
