"""Where a node keeps what a run's processes write: the run directory, or a folder of its own where it has not got that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....errors import InputError, UnbrokenError
from ....link.address import Address
from ....progress import RunDir, read_spec, read_terms
from ...wire import is_door


@dataclass(frozen=True)
class NodeFolder:
    """`run` is the run directory as the supervisor's host knows it; `own` has the same names below it, and is where this
    node's processes write their logs."""

    run: RunDir
    own: RunDir

    @property
    def shared(self) -> bool:
        """Whether this node has the run directory."""
        return self.own is self.run


def find_folder(run: RunDir, run_id: str, scratch: Path, door: Address | None, *, apart: bool) -> NodeFolder:
    """The folder of this node. `apart` says that it may be another machine than the supervisor's, which is met at `door`.

    A folder of the same name is not enough: it may be a copy, or that of an earlier host.
    """
    if not apart or _is_same(run, run_id, door):
        return NodeFolder(run, run)
    return NodeFolder(run, RunDir(scratch / "run"))


def _is_same(run: RunDir, run_id: str, door: Address | None) -> bool:
    try:
        if door is None:
            return read_spec(run.spec).run_id == run_id
        terms = read_terms(run)
        return bool(terms) and terms[-1].run_id == run_id and is_door(terms[-1].address, door)
    except (OSError, InputError, UnbrokenError):
        return False
