"""Wide utilisation tables are counted in one pass; the statistics see the same as from samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unbroken.errors import InputError
from unbroken.trace.readers import ReadOptions, detect, load
from unbroken.trace.readers.wide import metric_of
from unbroken.trace.statistics import compute


def wide(path: Path, values: np.ndarray, zone: str = "+08:00") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["Time," + ",".join(f"10.140.0.{i}" for i in range(values.shape[1]))]
    for k, row in enumerate(values):
        cells = ",".join("" if np.isnan(v) else f"{v:g}" for v in row)
        lines.append(f"2023-07-01 {8 + k // 240:02d}:{k // 4 % 60:02d}:{15 * (k % 4):02d}{zone},{cells}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_quantiles_mean_and_time_are_those_of_the_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    values = np.round(
        np.where(
            rng.random((960, 40)) < 0.3,
            0.0,
            np.where(rng.random((960, 40)) < 0.3, 100.0, rng.random((960, 40)) * 100),
        ),
        3,
    )
    values[5, 7] = np.nan
    path = wide(tmp_path / "seren" / "GPU_UTIL.csv", values)
    assert detect(path, ReadOptions())[0].name == "wide"
    with load([path]) as store:
        found = compute(store)
    (row,) = found["utilisation_quantiles"].dicts()
    real = np.sort(values[~np.isnan(values)])
    assert row["n"] == real.size
    assert row["cluster"] == "Seren"
    for p in (10, 25, 50, 75, 90):
        assert row[f"p{p}"] == pytest.approx(real[int(np.ceil(p / 100 * real.size)) - 1], abs=0.11)
    assert row["mean_exact"] == pytest.approx(real.mean(), rel=1e-3)
    (polar,) = found["polarisation"].dicts()
    assert polar["idle_pct"] == pytest.approx(100 * (np.round(real, 1) <= 5).mean(), abs=0.3)
    first = next(found["hardware_over_time"].dicts())
    assert str(first["time_utc"]) == "2023-07-01 00:00:00"
    assert first["mean"] == pytest.approx(np.nanmean(values[:240]), rel=0.1)


def test_shares_become_percent_and_units_are_converted(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    path = wide(tmp_path / "kalos" / "SM_ACTIVE.csv", rng.random((50, 5)))
    other = wide(tmp_path / "kalos" / "FB_USED.csv", np.full((50, 5), 2048.0))
    with load([path, other]) as store:
        rows = {r["metric"]: r for r in compute(store)["utilisation_quantiles"].dicts()}
    assert 30 < rows["sm_active_pct"]["p50"] < 70
    assert rows["gpu_mem_used_gib"]["p50"] == 2.0
    assert metric_of("DCGM_FI_DEV_POWER_USAGE") == ("gpu_power_w", 1.0)


def test_a_table_without_numbers_is_an_error(tmp_path: Path) -> None:
    path = wide(tmp_path / "GPU_UTIL.csv", np.full((3, 4), np.nan))
    with pytest.raises(InputError, match="no number"):
        load([path])
