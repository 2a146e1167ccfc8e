"""A distribution in a few numbers: point masses and a mixture of normals, in the value or in its logarithm.

That is what the published curves are reduced to: small enough to read, smooth enough to sample from, within a
percentage point or two of the curve (the fit's own error is kept beside it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Marginal:
    """`atoms`: (value, weight) point masses. `parts`: (weight, mean, deviation) normals of log(x) if `log`, else of
    x. Values are clipped to [low, high]. All weights sum to one. `error_pct`: largest distance to the curve that
    it was fitted to, in percentage points."""

    parts: tuple[tuple[float, float, float], ...]
    atoms: tuple[tuple[float, float], ...] = ()
    log: bool = True
    low: float = 0.0
    high: float = math.inf
    error_pct: float = 0.0

    def cdf(self, x: Sequence[float] | Array) -> Array:
        """Shares of values up to each x."""
        v = np.asarray(x, dtype=np.float64)
        out = np.zeros_like(v)
        for value, weight in self.atoms:
            out += weight * (v >= value)
        z = np.log(np.maximum(v, 1e-12)) if self.log else v
        for weight, mean, deviation in self.parts:
            out += weight * normal_cdf((z - mean) / deviation)
        out = np.where(v < self.low, 0.0, out)
        return np.where(v >= self.high, 1.0, np.minimum(out, 1.0))

    def quantile_table(self, n: int = 8192) -> tuple[Array, Array]:
        """(u, x): a table by which `np.interp(u)` gives quantiles (of log x if `log`)."""
        if self.log:
            lo = math.log(max(self.low, 1e-3))
            hi = (
                math.log(self.high)
                if math.isfinite(self.high)
                else max((m + 5 * s for _, m, s in self.parts), default=lo + 1)
            )
            grid = np.linspace(lo, hi, n)
            u = self.cdf(np.exp(grid))
        else:
            lo = self.low
            hi = self.high if math.isfinite(self.high) else max(m + 5 * s for _, m, s in self.parts)
            grid = np.linspace(lo, hi, n)
            u = self.cdf(grid)
        return u, grid

    def quantile(self, u: Array) -> Array:
        """The values at these shares."""
        table, grid = self.quantile_table()
        # first grid point whose share reaches u: point masses come out exactly at their value
        i = np.minimum(np.searchsorted(table, u, side="left"), len(grid) - 1)
        j = np.maximum(i - 1, 0)
        du = table[i] - table[j]
        # within an atom's jump stay at its point, else interpolate
        jump = du > 0.004
        frac = np.where(jump | (du <= 0), 1.0, (u - table[j]) / np.where(du <= 0, 1.0, du))
        z = grid[j] + np.clip(frac, 0, 1) * (grid[i] - grid[j])
        x: Array = np.exp(z) if self.log else z
        for value, _ in self.atoms:
            step = grid[1] - grid[0]
            near = jump & (np.abs((np.log(max(value, 1e-3)) if self.log else value) - z) <= step)
            x = np.where(near, value, x)
        return np.clip(x, self.low, self.high)

    def mean(self) -> float:
        """The mean, by 20,000 quantiles."""
        return float(self.quantile((np.arange(20000) + 0.5) / 20000).mean())

    def as_toml(self) -> dict[str, Any]:
        """The numbers as a TOML table."""
        out: dict[str, Any] = {"parts": [[round(v, 5) for v in p] for p in self.parts], "log": self.log}
        if self.atoms:
            out["atoms"] = [[round(v, 5) for v in a] for a in self.atoms]
        out["low"] = self.low
        if math.isfinite(self.high):
            out["high"] = self.high
        out["error_pct"] = round(self.error_pct, 2)
        return out

    @classmethod
    def from_toml(cls, data: Mapping[str, Any]) -> Marginal:
        """The reverse of `as_toml`."""
        return cls(
            tuple((float(a), float(b), float(c)) for a, b, c in data["parts"]),
            tuple((float(a), float(b)) for a, b in data.get("atoms", ())),
            bool(data.get("log", True)),
            float(data.get("low", 0.0)),
            float(data.get("high", math.inf)),
            float(data.get("error_pct", 0.0)),
        )


def normal_cdf(z: Array) -> Array:
    """The standard normal distribution function (Abramowitz and Stegun 7.1.26 of the error function, 1.5e-7)."""
    x = np.abs(z) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = 1 - poly * np.exp(-x * x)
    return np.asarray(0.5 * (1 + np.sign(z) * erf))


def fit(
    x: Sequence[float],
    cdf: Sequence[float],
    *,
    log: bool,
    parts: int,
    atoms: Sequence[float] = (),
    low: float,
    high: float,
) -> Marginal:
    """The marginal nearest to points of a distribution function; `cdf` in 0..1, `atoms` the values that may be heavy.

    An atom's weight is the curve's share at it (at `low`) or what is left above its predecessor (at `high`). The
    mixture is found by expectation maximisation on quantiles of the curve, then its weights by least squares.
    """
    xs, ps = np.asarray(x, float), np.asarray(cdf, float)
    order = np.argsort(xs, kind="stable")
    xs, ps = xs[order], np.maximum.accumulate(ps[order])
    masses: list[tuple[float, float]] = []
    u_low, u_high = 0.0, 1.0
    for value in atoms:
        if value <= low:
            u_low = float(ps[xs <= value].max(initial=0.0))
            masses.append((value, u_low))
        else:
            u_high = float(ps[xs < value - 1e-9].max(initial=0.0))
            masses.append((value, 1 - u_high))
    z = np.log(np.maximum(xs, 1e-3)) if log else xs
    inside = (ps >= u_low) & (ps <= u_high)
    pu, pz = ps[inside], z[inside]
    if u_low == 0 and pu.size and pu[0] > 0:
        start = math.log(max(low, 0.5)) if log else low
        pu, pz = np.concatenate([[0.0], pu]), np.concatenate([[min(start, pz[0])], pz])
    rest = max(u_high - u_low, 0.0)
    if rest < 1e-6 or pu.size < 2:
        return Marginal((), tuple(masses), log, low, high)
    n = 6000
    u = u_low + rest * (np.arange(n) + 0.5) / n
    keep = np.concatenate([[True], np.diff(pu) > 0])
    sample = np.interp(u, pu[keep], pz[keep])
    best: Marginal | None = None
    for k in range(1, parts + 1):
        w, m, s = mixture(sample, k)
        made = Marginal(
            tuple((float(a * rest), float(b), float(c)) for a, b, c in zip(w, m, s, strict=True)),
            tuple(masses), log, low, high,
        )  # fmt: skip
        error = float(np.abs(made.cdf(xs) - ps).max()) * 100
        made = Marginal(made.parts, made.atoms, log, low, high, error)
        if best is None or error < best.error_pct - 0.15:
            best = made
    assert best is not None
    return best


def mixture(sample: Array, k: int, rounds: int = 400) -> tuple[Array, Array, Array]:
    """Weights, means and deviations of k normals, by expectation maximisation from equal slices of the sample."""
    slices = np.array_split(np.sort(sample), k)
    m = np.array([p.mean() for p in slices])
    spread = max(float(sample.std()), 1e-3)
    s = np.array([max(float(p.std()), 0.05 * spread) for p in slices])
    w = np.full(k, 1 / k)
    for _ in range(rounds):
        d = (sample[:, None] - m) / s
        like = w * np.exp(-0.5 * d * d) / s + 1e-300
        r = like / like.sum(1, keepdims=True)
        mass = r.sum(0)
        w = mass / mass.sum()
        m = (r * sample[:, None]).sum(0) / mass
        s = np.sqrt((r * (sample[:, None] - m) ** 2).sum(0) / mass)
        s = np.maximum(s, 0.01 * spread)
    return w, m, s
