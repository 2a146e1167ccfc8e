"""The readings of the last tick for Prometheus, under the schema's names with the prefix `unbroken_`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from ...errors import MissingExtra, UsageError
from ...samples.schema import METRICS
from ..samplers.reading import Reading

PREFIX = "unbroken_"


class LastTick:
    """A sink that remembers the newest tick, and the events since the last scrape."""

    def __init__(self, node: str, cluster: str | None = None) -> None:
        self._labels = [cluster or "", node]
        self._lock = threading.Lock()
        self._readings: dict[tuple[str, str, str], float] = {}
        self._xids: dict[tuple[str, str], int] = {}

    def __call__(self, when: float, readings: list[Reading]) -> None:
        """Takes a tick. Slow metrics keep their last value."""
        with self._lock:
            for gpu, device, metric, value in readings:
                place = "" if gpu is None else str(gpu)
                if metric == "xid":
                    key = (place, str(int(value)))
                    self._xids[key] = self._xids.get(key, 0) + 1
                else:
                    self._readings[metric, place, device or ""] = value

    def collect(self) -> Iterator[Any]:
        """prometheus_client's collector: one family for each metric."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names = ["cluster", "node", "gpu", "device"]
        with self._lock:
            readings, xids = dict(self._readings), dict(self._xids)
        families: dict[str, Any] = {}
        for (metric, gpu, device), value in readings.items():
            if metric not in families:
                kind = CounterMetricFamily if metric.endswith("_total") else GaugeMetricFamily
                families[metric] = kind(PREFIX + metric, METRICS.get(metric, metric), labels=names)
            families[metric].add_metric([*self._labels, gpu, device], value)
        if xids:
            family = CounterMetricFamily(
                PREFIX + "xid_events", "XID events by number", labels=[*names[:3], "xid"]
            )
            for (gpu, number), count in xids.items():
                family.add_metric([*self._labels, gpu, number], count)
            families["xid"] = family
        yield from families.values()


def serve(last: LastTick, address: str) -> tuple[int, Any]:
    """Serves `last` on HOST:PORT (port 0 chooses one); returns the port and a function that ends it.

    Raises UsageError for an address that cannot be used, MissingExtra without prometheus_client.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise MissingExtra("prometheus-client", "telemetry", what="the exporter") from None
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"'{address}' is not an address", hint="Write it like 0.0.0.0:9400 or :9400")
    registry = CollectorRegistry()
    registry.register(last)
    try:
        server, thread = start_http_server(int(port), host or "0.0.0.0", registry)
    except OSError as e:
        raise UsageError(f"the exporter cannot listen on {address}: {e.strerror}") from e

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)

    return server.server_port, end
