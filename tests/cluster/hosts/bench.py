"""What benches of hosts on this machine have in common."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.cluster.holding.cgroups import Cgroups

from ..test_contract_local import hold_by

IMPOSSIBLE: Mapping[str, str] = {
    "lose": "a host that does not answer may live: it is unreachable, and lost only where it says so",
    "preempt": "nobody takes hosts away",
    "end_allocation": "hosts of one's own have no end",
}


def lend(made: Any) -> Iterator[Any]:
    """The bench `made` for one test; nothing of its run is left afterwards."""
    local = hold_by(None, made.folder)
    there = next(local)
    there.run_id = made.run_id
    yield made
    made.close()
    time.sleep(0.2)
    for root in Cgroups.left_by(made.run_id):
        # Several programs on one machine try it at once, and may be ended over that.
        for folder in (*root.glob("probe-*"), root):
            with contextlib.suppress(OSError):
                folder.rmdir()
    for _ in local:
        pass
