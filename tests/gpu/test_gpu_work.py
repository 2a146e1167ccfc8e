"""What an agent reads of a rank's work from its GPU's counters is the work, and no waiting: FSDP2 on two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs here")]


def test_a_tenth_more_work_is_told_as_such_and_waiting_is_not(tmp_path: Path) -> None:
    from benchmarks.gpu_work import measure

    found = measure(tmp_path, 8.0, 100.0)
    assert found["codes"] == [0, 0] and not found["lacking"]
    by_tensor = {n: p["tensor_ratio"]["mean"] for n, p in found["parts"].items() if n != "wait"}
    assert 1.05 < by_tensor["more"] < 1.15 and 0.85 < by_tensor["less"] < 0.95, found
    assert 0.97 < by_tensor["equal"] < 1.03 and 0.97 < by_tensor["processor"] < 1.03, found
    assert found["parts"]["wait"]["counted"][1]["tensor_active_pct"] < 0.5, "a kernel of NCCL uses none"
