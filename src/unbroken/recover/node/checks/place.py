"""Whether this node sees the place of an attempt's checkpoints as the supervisor's host does: a folder of the same name on
another disk would take its part of each checkpoint, and none would ever be whole."""

from __future__ import annotations

import asyncio
import logging

from ....checkpoint.catalogue.placement import read_claim
from ....checkpoint.storage import open_storage
from ....errors import UnbrokenError
from ...wire import Message

_log = logging.getLogger("unbroken.agent")
_TRIES, _PAUSE_S = 4, 0.5
"""A network file system may show what another host has just made a moment later."""


async def check_place(request: Message, run_id: str, node: str) -> Message:
    """The announcement of an attempt as the node's keeper is to get it: with a refusal for ranks that use this place, where the
    supervisor's claim of it cannot be read here."""
    place = request.get("place") or {}
    if request.get("op") != "attempt" or "refused" in place or not place.get("url"):
        return request
    url, why = str(place["url"]), ""
    for _ in range(_TRIES):
        try:
            claim = await asyncio.to_thread(lambda: read_claim(open_storage(url), int(request["attempt"])))
            if claim.run_id == run_id:
                return request
            why = ""
        except (UnbrokenError, OSError) as e:
            why = e.message if isinstance(e, UnbrokenError) else str(e)
        await asyncio.sleep(_PAUSE_S)
    said = f"cannot be used here: {why}" if why else "is another folder here than on the supervisor's host"
    _log.warning("%s %s", url, said)
    refusal = {
        "message": f"the place of checkpoints {said}", "where": f"{url}, on {node}", "place": url,
        "hint": "Give Checkpointer a folder that every host has, such as one of a shared file system, or an address such as "
        "s3://bucket/prefix; or put the run directory on a shared file system",
    }  # fmt: skip
    return {**request, "place": {**place, "refused": refusal}}
