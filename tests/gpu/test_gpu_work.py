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
    parts = found["parts"]
    by_sms = {n: p["active_ratio"]["mean"] for n, p in parts.items() if n != "wait"}
    waits = {n: p["waits_ratio"]["mean"] for n, p in parts.items() if n != "wait"}
    assert 1.05 < by_sms["more"] < 1.15 and 0.85 < by_sms["less"] < 0.95 and 0.97 < by_sms["equal"] < 1.03, (
        found
    )
    assert waits["more"] < 1 < min(waits["less"], waits["processor"], waits["behind"]), found
    alone = parts["wait"]["counted"][1]
    assert alone["tensor_active_pct"] < 0.5 and 2 < alone["sm_active_pct"] < 40, "a kernel of NCCL"
