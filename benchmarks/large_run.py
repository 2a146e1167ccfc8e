"""CPU seconds to read and merge the parts of a large checkpoint, as the keeper that commits it does.

python benchmarks/large_run.py [RANKS] [TENSORS]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from unbroken.checkpoint.format.layout import plan, spec
from unbroken.checkpoint.format.manifest import (
    CHUNK_BYTES,
    FileRecord,
    Manifest,
    PartManifest,
    Sharding,
    data_name,
    merge,
    tensor_part,
)
from unbroken.checkpoint.format.tensors import Heads


def measure(ranks: int, tensors: int) -> dict[str, float]:
    """Every tensor is sharded over all ranks; the parts are made beforehand."""
    layout = plan(spec(f"layers.{i}.weight", "float32", (8, 64)) for i in range(tensors))

    def encoded(rank: int) -> bytes:
        box = ((8 * rank, 0), (8, 64))
        sharding = Sharding((8 * ranks, 64), ("Shard(0)",), (ranks,), ("dp",), (box,))
        records = {s.name: tensor_part(rank, layout, s.name, "float32", sharding) for s in layout.slots}
        sums = ("0" * 16,) * -(-layout.file_bytes // CHUNK_BYTES)
        file = FileRecord(data_name(rank), layout.file_bytes, sums)
        return PartManifest("bench", 1, 1, rank, ranks, records, file).encoded

    parts = [encoded(r) for r in range(ranks)]
    heads: Heads = {}
    began = time.process_time()
    manifest = merge(PartManifest.decode(p, where="bench", heads=heads) for p in parts)
    merged = time.process_time()
    data = manifest.encoded
    read = time.process_time()
    Manifest.decode(data, where="bench")
    return {
        "ranks": ranks,
        "tensors": tensors,
        "merge_cpu_s": round(merged - began, 3),
        "read_manifest_cpu_s": round(time.process_time() - read, 3),
        "manifest_bytes": len(data),
    }


if __name__ == "__main__":
    ranks, tensors = map(int, sys.argv[1:] or ("512", "1000"))
    print(json.dumps(measure(ranks, tensors)))
