"""Where a site's node history lies: a folder that all runs can reach, with one file a run.

Each file has one writer, the supervisor of its run, and is only added to: so no lock is needed, on any file system. A line
that was half written, or is of something else, is passed over.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .history import NodeIncident, NodeScore, Sighting, score_nodes

_log = logging.getLogger("unbroken.supervisor")
_SAFE = re.compile(r"[^A-Za-z0-9._-]")


class SiteHistory:
    """One site's folder, as one run sees it. Reading and writing never raise: a history that cannot be had costs nothing."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder, self.run_id = folder, run_id
        self._file = folder / f"{_SAFE.sub('-', run_id)}.jsonl"
        self._seen: dict[str, tuple[str, ...]] = {}

    def note_incident(self, incident: NodeIncident) -> None:
        """Adds one."""
        self._append({"kind": "incident", **asdict(incident)})

    def note_gpus(self, at: float, gpus: Mapping[str, tuple[str, ...]]) -> None:
        """Adds which GPUs are in which node, where that is news."""
        for node, uuids in gpus.items():
            if uuids and self._seen.get(node) != uuids:
                self._seen[node] = uuids
                self._append({"kind": "sighting", "at": at, "node": node, "gpus": list(uuids)})

    def score(self, now: float) -> dict[str, NodeScore]:
        """What is held against each node at a moment (seconds since the epoch)."""
        incidents, sightings = [], []
        for r in self._records():
            try:
                if r.get("kind") == "incident":
                    incidents.append(
                        NodeIncident(
                            float(r["at"]), str(r["run"]), int(r["incident"]), str(r["node"]), str(r["reason"]),
                            min(1.0, max(0.0, float(r["confidence"]))), str(r.get("gpu", "")),
                        )
                    )  # fmt: skip
                elif r.get("kind") == "sighting":
                    sightings.append(Sighting(float(r["at"]), str(r["node"]), tuple(map(str, r["gpus"]))))
            except (KeyError, TypeError, ValueError):
                continue
        return score_nodes(incidents, sightings, now)

    def _records(self) -> Iterator[dict[str, Any]]:
        try:
            files = sorted(self.folder.glob("*.jsonl"))
        except OSError:
            return
        for file in files:
            try:
                lines = file.read_bytes().splitlines()
            except OSError as e:
                _log.warning("%s cannot be read: %s", file, e)
                continue
            for line in lines:
                try:
                    value = json.loads(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield value

    def _append(self, record: dict[str, Any]) -> None:
        """One write of one line: it is there whole, or as a torn last line that readers pass over."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            data = b"\n" if self._is_torn() else b""
            fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, data + json.dumps(record).encode() + b"\n")
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as e:
            _log.warning("the site's node history cannot be written: %s", e)

    def _is_torn(self) -> bool:
        try:
            with open(self._file, "rb") as f:
                f.seek(-1, os.SEEK_END)
                return f.read(1) != b"\n"
        except OSError:
            return False
