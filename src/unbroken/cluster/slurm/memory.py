"""What a successor of the supervisor on this host has to know of a run's allocation: beside the launches, in memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ... import atomic
from ...private import private_folder
from ..contract import Cordon

_NAME = "allocation"


@dataclass(frozen=True)
class NodeFacts:
    """What the survey of a node has found that its agent is to be told: `visible` the job's GPUs as CUDA_VISIBLE_DEVICES names
    them (None where Slurm gave none), `srun` whether it can start steps."""

    visible: str | None = None
    srun: bool = False


class Memory:
    """The nodes that the run was given of a job, and its own list of cordons. On another host nothing is remembered: then the
    run takes the first nodes of its allocation."""

    def __init__(self, folder: Path, job: str) -> None:
        self._path, self._job = folder / _NAME, job

    @property
    def given(self) -> list[str]:
        return list(self._read().get("given", []))

    def give(self, nodes: Collection[str]) -> None:
        """These are the run's from now on, and no others."""
        self._write(list(nodes), self.cordons.values(), self.facts)

    @property
    def facts(self) -> dict[str, NodeFacts]:
        return {name: NodeFacts(**value) for name, value in self._read().get("facts", {}).items()}

    def learn(self, facts: Mapping[str, NodeFacts]) -> None:
        """What nodes have said of themselves, beside what others did before."""
        self._write(self.given, self.cordons.values(), {**self.facts, **facts})

    @property
    def cordons(self) -> dict[str, Cordon]:
        return {c["node"]: Cordon(**c) for c in self._read().get("cordons", [])}

    def put(self, cordons: Mapping[str, Cordon]) -> None:
        """The run's own list, whole."""
        self._write(self.given, cordons.values(), self.facts)

    def _read(self) -> dict[str, Any]:
        try:
            value = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        found: dict[str, Any] = value if value.get("job") == self._job else {}
        return found

    def _write(
        self, given: Collection[str], cordons: Collection[Cordon], facts: Mapping[str, NodeFacts]
    ) -> None:
        if not given and not cordons:
            self._path.unlink(missing_ok=True)
            return
        private_folder(self._path.parent)
        value = {
            "job": self._job, "given": list(given), "cordons": [asdict(c) for c in cordons],
            "facts": {name: asdict(f) for name, f in facts.items()},
        }  # fmt: skip
        atomic.write_json(self._path, value, durable=False)
