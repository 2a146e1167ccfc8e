"""What did this machine do in each phase of some work? Records three phases and joins them with the readings.

python examples/telemetry_phases.py
"""

import hashlib
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from unbroken.errors import UnbrokenError
from unbroken.telemetry.join import connect, open_samples, open_spans, per_span
from unbroken.telemetry.recording.record import record
from unbroken.telemetry.recording.spool import Spool
from unbroken.telemetry.samplers.gpu import GpuSampler, load_nvml
from unbroken.telemetry.samplers.host import HostSampler
from unbroken.telemetry.samplers.reading import Sampler


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    samplers: list[Sampler] = [HostSampler()]
    try:
        samplers.append(GpuSampler(load_nvml()))
    except UnbrokenError as e:
        print(f"host only: {e}")
    spool, stop = Spool(folder / "readings", node="here"), threading.Event()
    recorder = threading.Thread(
        target=record, args=(samplers, [spool.write]), kwargs={"every_s": 0.05, "stop": stop}
    )
    recorder.start()

    spans = ["label,part,node,start_utc,end_utc"]
    for part in ("load", "generate", "score"):
        start = datetime.now(UTC)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            if part == "generate":
                hashlib.sha256(bytes(1 << 20)).digest()
            else:
                time.sleep(0.01)
        spans.append(f"trial,{part},here,{start.isoformat()},{datetime.now(UTC).isoformat()}")

    stop.set()
    recorder.join()
    spool.close()
    (folder / "spans.csv").write_text("\n".join(spans) + "\n")
    con = connect()
    open_samples(con, [folder / "readings"])
    open_spans(con, folder / "spans.csv")
    for row in per_span(con, ["host_cpu_util_pct", "sm_active_pct"]):
        print(f"{row['part']:9} {row['metric']:18} mean {row['mean']:5.1f}  ({row['readings']} readings)")


if __name__ == "__main__":
    main()
