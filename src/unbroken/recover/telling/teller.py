"""Passes on what happens to a run: to a webhook, to the site's node history, to a file of metrics. Nothing of it holds anything up."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from ... import atomic
from ...diagnose.redact.redact import Redactor
from ...progress.records.incident import Incident
from ...progress.records.state import RunState
from ...progress.records.verdict import Category
from ..site.history import NodeIncident, NodeScore, find_avoided
from ..site.store import SiteHistory
from .messages import describe_end, describe_incident
from .metrics import render_metrics
from .webhook import Webhook

_log = logging.getLogger("unbroken.supervisor")
_DRAIN_S = 5.0


class Teller:
    """What one run has to tell. Each of the three may be missing."""

    def __init__(
        self,
        run_id: str,
        *,
        webhook: Webhook | None = None,
        history: SiteHistory | None = None,
        metrics: Path | None = None,
    ) -> None:
        self.run_id, self._webhook, self._history, self._metrics = run_id, webhook, history, metrics
        self._redactor = Redactor()
        self._scores: dict[str, NodeScore] = {}

    def read_history(self, now: float) -> None:
        """Reads what the site holds against its nodes."""
        if self._history is not None:
            self._scores = self._history.score(now)

    @property
    def avoided(self) -> frozenset[str]:
        """Nodes that are not asked for, as far as there are others."""
        return frozenset(find_avoided(self._scores))

    @property
    def priors(self) -> Mapping[str, float]:
        """How likely each node is a cause before anything is known of an incident."""
        return {n: s.prior for n, s in self._scores.items()}

    def note_gpus(self, at: float, gpus: Mapping[str, tuple[str, ...]]) -> None:
        """Which GPUs are in which node now."""
        if self._history is not None:
            self._history.note_gpus(at, gpus)

    def tell_incident(self, incident: Incident, gpus: Mapping[str, tuple[str, ...]]) -> None:
        """An incident was decided on; `gpus` are the UUIDs of each node's GPUs, by their place."""
        if self._webhook is not None:
            self._webhook.post(describe_incident(self.run_id, incident, self._redactor))
        v = incident.verdict
        if self._history is None or v is None or v.category is not Category.INFRASTRUCTURE:
            return
        named = {v.faulty.node} if v.faulty is not None and v.faulty.node else {*v.cordon}
        for node in sorted(n for n in named if n):
            gpu = v.faulty.gpu if v.faulty is not None and v.faulty.node == node else None
            mine = gpus.get(node, ())
            uuid = mine[gpu] if gpu is not None and gpu < len(mine) else ""
            self._history.note_incident(
                NodeIncident(
                    incident.detected, self.run_id, incident.number, node, incident.reason, v.confidence, uuid
                )
            )

    def tell_end(self, how: str, step: int, why: str = "") -> None:
        """The run has ended; waits a few seconds until that is sent."""
        if self._webhook is None:
            return
        self._webhook.post(describe_end(self.run_id, how, step, why, self._redactor))
        self._webhook.drain(_DRAIN_S)

    def write_metrics(
        self,
        state: RunState,
        now: float,
        *,
        step: int = -1,
        loss: float | None = None,
        step_s: float | None = None,
        up: bool = True,
    ) -> None:
        """Writes the file of metrics again; a disk that refuses costs a line in the log."""
        if self._metrics is None:
            return
        text = render_metrics(self.run_id, state, now, step=step, loss=loss, step_s=step_s, up=up)
        try:
            atomic.write_bytes(self._metrics, text.encode())
        except OSError as e:
            _log.warning("metrics cannot be written: %s", e)
