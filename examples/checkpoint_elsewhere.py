"""Train on two ranks, go on with one: the checkpoint loads wherever it has to.

    python examples/checkpoint_elsewhere.py

No GPU, no second process: two ranks' files are written here one after the other, as a keeper would, then loaded into
a model that is not sharded, through PyTorch's own `dcp.load`, and exported for `transformers`.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from unbroken.checkpoint.capture import direct
from unbroken.checkpoint.convert import export
from unbroken.checkpoint.format.manifest import Sharding
from unbroken.checkpoint.format.position import Position
from unbroken.checkpoint.restore.reshard import CheckpointReader
from unbroken.checkpoint.storage.posix import PosixStorage

warnings.filterwarnings("ignore", "torch.distributed is disabled")


def main() -> None:
    """Writes a sharded checkpoint, loads it whole, exports it."""
    root = Path(tempfile.mkdtemp(prefix="checkpoint-elsewhere-"))
    storage, weight, parts = PosixStorage(root), torch.randn(6, 4), []
    for rank in range(2):
        rows = weight[3 * rank : 3 * rank + 3]
        box = ((3 * rank, 0), (3, 4))
        records = {"model.weight": ("float32", Sharding((6, 4), ("Shard(0)",), (2,), ("dp",), (box,)))}
        values = {"model": {"weight": {"$": "tensor", "name": "model.weight"}}, "lr": 0.01}
        stamp = direct.Stamp("example", 1, 1200, rank, 2, Position(0, ((0, 38400),)))
        parts.append(direct.write_pieces(storage, records, lambda _, r=rows: r, values, stamp))
    manifest = direct.commit(storage, parts)

    state = {"model": {"weight": torch.zeros(6, 4)}, "lr": 0.0}
    dcp.load(state, storage_reader=CheckpointReader(root))
    print("loaded on one rank:", torch.equal(state["model"]["weight"], weight), "lr", state["lr"])
    print("the data goes on at sample", manifest.position.samples[-1][1])

    done = export.to_huggingface(storage, manifest.name, root / "hf")
    print("exported:", ", ".join(done.files))


if __name__ == "__main__":
    main()
