"""What a successor of the supervisor on this host has to know of a run's allocation: beside the launches, in memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

from ... import atomic
from ...private import private_folder
from ..contract import Cordon

_NAME = "allocation"


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
        self._write(list(nodes), self.cordons.values())

    @property
    def cordons(self) -> dict[str, Cordon]:
        return {c["node"]: Cordon(**c) for c in self._read().get("cordons", [])}

    def put(self, cordons: Mapping[str, Cordon]) -> None:
        """The run's own list, whole."""
        self._write(self.given, cordons.values())

    def _read(self) -> dict[str, list]:
        try:
            value = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return value if value.get("job") == self._job else {}

    def _write(self, given: Collection[str], cordons: Collection[Cordon]) -> None:
        if not given and not cordons:
            self._path.unlink(missing_ok=True)
            return
        private_folder(self._path.parent)
        value = {"job": self._job, "given": list(given), "cordons": [asdict(c) for c in cordons]}
        atomic.write_json(self._path, value, durable=False)
