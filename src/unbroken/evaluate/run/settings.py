"""How an evaluation is run; nothing here changes a score."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...errors import UnbrokenError
from ..engines import Slot
from ..model.cache import Places, default_places


@dataclass(frozen=True)
class Settings:
    """Workers, places, deadlines."""

    slots: tuple[Slot, ...] = (Slot("w0"),)
    """Workers that the engine starts; none: only workers that join by themselves."""
    cpu_workers: int = 2
    """Processes for metrics."""
    prepare_workers: int = 2
    """Processes that build prompts."""
    cache: str = "auto"
    """'auto': copy the model into shared memory unless it lies on a disk of this machine; 'always'; 'never'."""
    places: Places = field(default_factory=default_places)
    priors: Path | None = None
    device: str = "cpu"
    """Name of the hardware, for priors."""
    load_s: float | None = None
    """Expected seconds from a worker's start to its first block; None: as learnt."""
    beat_s: float = 2.0
    stall_s: float = 600.0
    """A block that takes longer than this and than `stall_factor` times what was expected is taken to hang."""
    stall_factor: float = 30.0
    wait_for_workers_s: float = 0.0
    """How long to wait, without any worker, for one to join; 0: as long as it takes where no slots are given."""
    keep_going: bool = False
    """Go on without tasks that cannot be prepared; they are reported at the end."""
    stealing: bool = True
    advertise: str = ""
    """Host name that workers elsewhere connect to; empty: this machine's."""


@dataclass
class Abort(Exception):
    """Ends the coordinator's event loop with an error for the user."""

    error: UnbrokenError
