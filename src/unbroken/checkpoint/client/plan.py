"""Where everything of a state of one shape lies in its rank's file, and what never changes from save to save."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from typing import Any

import torch

from ...link.framing import Encoded
from ...version import __version__
from ..capture.state import Captured
from ..format import layout as arena
from ..format.manifest import FileRecord, PartManifest, data_name, tensor_part
from ..ranks.environment import Place

CHANGING = (
    "check",
    "kind",
    "schema",
    "file",
    "step",
    "attempt",
    "position",
    "values",
    "rng",
    "time",
    "replicas",
    "went_on",
)
"""Keys of a part that each save, or the keeper that writes it, fills in."""


@dataclass(frozen=True)
class SavePlan:
    """`signature` is the shape of the states that it is for; `buffer_bytes` what a buffer for one of them must have."""

    signature: Any
    layout: arena.Layout
    header: bytes
    buffer_bytes: int
    body: Encoded
    """The part without what is `CHANGING`."""


def plan_for(captured: Captured, signature: Any, p: Place, run_id: str) -> SavePlan:
    """The plan for states with the shape of this one, on this rank."""
    layout = arena.plan(captured.specs(), captured.aliases)
    tensors = {
        name: tensor_part(p.rank, layout, name, dtype, sharding)
        for name, (dtype, sharding) in captured.tensors.items()
    }
    versions = {
        "unbroken": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    part = PartManifest(
        run_id, 0, 0, p.rank, p.world_size, tensors, FileRecord(data_name(p.rank), layout.file_bytes, ()),
        aliases=captured.aliases, versions=versions,
    )  # fmt: skip
    body = {k: v for k, v in json.loads(part.encoded).items() if k not in CHANGING}
    return SavePlan(
        signature, layout, layout.header({"rank": str(p.rank)}), whole_pages(layout.file_bytes), Encoded(body)
    )


def whole_pages(size: int) -> int:
    """A little more than needed: values of other lengths must not ask for new buffers."""
    return -(-size // arena.ALIGN) * arena.ALIGN
