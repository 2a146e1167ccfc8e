"""What an evaluation cost: tokens a second, how near that is to what the GPU can do at all, GPU hours, energy. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..contracts import Report

PEAKS: dict[str, tuple[float, float]] = {
    "H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "B200": (2250e12, 8.0e12), "A100": (312e12, 2.0e12), "L40S": (362e12, 0.864e12),
    "L4": (121e12, 0.3e12), "A10": (125e12, 0.6e12), "V100": (125e12, 0.9e12),
}  # fmt: skip
"""By a word of the GPU's name: dense 16-bit FLOP/s and bytes/s of its memory, by the vendor's data sheets (SXM parts)."""
TOGETHER = 256
"""Texts that share one reading of the weights, at most: what the limit grants."""
FORMULA = (
    "the least time: 2 x parameters x (tokens read + made) / peak FLOP/s, or 2 bytes x parameters x tokens made / 256 / memory bandwidth, "
    "whichever is longer, over the GPU time spent in inference. Keys and values, and prefixes that are read once for many, are left out of it"
)


@dataclass(frozen=True)
class Cost:
    """Of one evaluation, as far as it is known."""

    gpu_hours: float
    """Of all workers, from their start to their end: loading and waiting too. Of CPU workers: worker hours."""
    busy_s: float
    """GPU seconds inside inference."""
    tokens_read: int
    tokens_made: int
    limit_share: float | None
    """See FORMULA; None where the GPU or the model's size is not known, or nothing was counted."""
    energy_j: float | None
    """None where not every worker with a GPU knows its own."""

    @property
    def read_per_s(self) -> float:
        """Tokens of requests per second and GPU of inference."""
        return self.tokens_read / self.busy_s if self.busy_s else 0.0

    @property
    def made_per_s(self) -> float:
        """Generated tokens per second and GPU of inference."""
        return self.tokens_made / self.busy_s if self.busy_s else 0.0


def cost_of(report: Report) -> Cost:
    """Adds it up. GPU seconds: each worker's time by the number of its GPUs."""
    width = {w.name: max(1, len(w.gpus)) for w in report.workers}
    busy = sum(t.busy_s * width.get(t.worker, 1) for t in report.trials)
    read, made = (sum(getattr(t, f"tokens_{k}") for t in report.trials) for k in ("read", "made"))
    held = sum(max(0.0, (w.ended or report.ended) - w.started) * width[w.name] for w in report.workers)
    own = [w.energy_j for w in report.workers if w.gpus]
    energy = sum(e for e in own if e is not None) if own and all(e is not None for e in own) else None
    return Cost(held / 3600, busy, read, made, _limit_share(report, busy, read, made), energy)


def _limit_share(report: Report, busy: float, read: int, made: int) -> float | None:
    names = {c.device for s in report.scores for c in s.conditions}
    peaks = {p for name in names if (p := peak_of(name)) is not None}
    if len(peaks) != 1 or not (report.model_b and busy and read + made):
        return None
    flops, bandwidth = peaks.pop()
    parameters = report.model_b * 1e9
    least = max(2 * parameters * (read + made) / flops, 2 * parameters * made / TOGETHER / bandwidth)
    return least / busy


def peak_of(device: str) -> tuple[float, float] | None:
    """(FLOP/s in 16 bits, bytes/s of memory) of a GPU by its name; None where it is not in the table."""
    words = device.replace("-", " ").split()
    return next((PEAKS[w] for w in words if w in PEAKS), None)
