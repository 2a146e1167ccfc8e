"""The benchmark's profile of NVML calls works on any GPU, so that a run on a lent one is not lost to a slip."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unbroken.telemetry.recording.spool import Spool
from unbroken.telemetry.samplers.gpu import GpuSampler
from unbroken.telemetry.samplers.host import HostSampler
from unbroken.testing.nvml import FakeGpu, FakeNvml


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "telemetry.py"
    sys.path.insert(0, str(path.parent))  # as where it is started as a script: others lie beside it
    spec = importlib.util.spec_from_file_location("telemetry_benchmark", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("gpu", [FakeGpu(), FakeGpu(gpm=False, links=0, mem_temp_c=None, nvlink_by="call")])
def test_profile(benchmark: Any, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.time, "sleep", lambda s: None)
    nvml = FakeNvml([gpu])
    spool = Spool(tmp_path, node="n")
    ticks = benchmark.profile_ticks(nvml, GpuSampler, HostSampler(), spool)
    assert ticks["calls_of_a_tick"]["nvmlDeviceGetUtilizationRates"]["a_tick"] == 1
    assert ticks["parts"]["gpus"]["wall"] > 0
    calls = benchmark.profile_calls(nvml)
    assert calls["power"]["wall"] > 0 and "AttributeError" in calls["energy"]
    if gpu.links:
        assert calls["NVML_FI_DEV_NVLINK_ERROR_DL_CRC, 18 links"]["answered"] == "18 of 18"
    seen = benchmark.nvlink_before_and_after(nvml, {})
    assert seen[0]["links_up"] == gpu.links


def test_ticks_are_counted_in_the_spool(benchmark: Any, tmp_path: Path) -> None:
    spool = Spool(tmp_path, node="n")
    host = HostSampler()
    for i in range(3):
        assert benchmark.ticks_in(tmp_path) == i
        spool.write(float(i), host.read(float(i)))
