"""Does a snapshot hold the state at the call? A long kernel is queued, then an update, then the save, all at once.

    python benchmarks/torn_snapshot.py [--out FILE]      # needs a GPU

Each contender saves parameters that are 0 before the queued update, 1 at the call, 2 after the next one. Anything but 1 in
the snapshot is torn state. torch's own stager copies on a stream that waits for nothing; ours waits for an event of
the training stream, and the next update waits for the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

MIB = 1024


def parameters() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """Zeros, and an optimizer whose every step adds one. It has made a step: loading a kernel waits for the GPU."""
    w = torch.nn.Parameter(torch.full((MIB << 18,), -1.0, device="cuda"))
    w.grad = torch.full_like(w, -1.0)
    optimizer = torch.optim.SGD([w], lr=1.0)
    optimizer.step()
    return w, optimizer


def shares(t: torch.Tensor) -> dict[str, float]:
    """Which part of the values is of before the update, of the call, of after it."""
    return {str(v): round(float((t == v).float().mean()), 4) for v in (0, 1, 2)}


def queue_work() -> None:
    torch.cuda._sleep(1)  # loaded now, not later
    torch.cuda.synchronize()
    torch.cuda._sleep(int(4e9))  # about two seconds: longer than it takes to pin a buffer


def dcp() -> dict[str, Any]:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    class Reused(DefaultStager):  # torch 2.11's closes itself after its first save (pytorch#183413)
        def _stage(self, state_dict: Any, **kw: Any) -> Any:
            inner = self._state_dict_stager
            close, inner.close = inner.close, lambda: None
            try:
                return super()._stage(state_dict, **kw)
            finally:
                inner.close = close

    w, optimizer = parameters()
    stager = Reused(
        StagingOptions(
            use_pinned_memory=True, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=True
        )
    )
    state = {"w": w.detach()}  # the same tensor each time: it caches its buffers by storage
    staged: Any = stager.stage(state)
    staged = staged.result() if hasattr(staged, "result") else staged
    queue_work()
    optimizer.step()
    staged = stager.stage(state)
    if hasattr(staged, "result"):
        staged = staged.result()  # its contract: wait for this before the next update
    early = not torch.cuda.current_stream().query()
    optimizer.step()
    torch.cuda.synchronize()
    return {**shares(staged["w"]), "done before the state was there": early}


def ours() -> dict[str, Any]:
    from unbroken import Checkpointer

    folder = tempfile.mkdtemp(prefix="unbroken-torn-")
    w, optimizer = parameters()
    c = Checkpointer(folder, snapshot_every=1, persist_every=1000, memory="8GiB")
    state = {"w": w, "o": optimizer}
    for step in (1, 2, 3):
        c.save(step, state).host.result(60)
    queue_work()
    optimizer.step()
    saved = c.save(4, state)
    early = saved.host.done()
    optimizer.step()  # no waiting: the stream does
    ahead = not torch.cuda.current_stream().query()
    saved.host.result(60)
    c.restore(state)
    c.close()
    shutil.rmtree(folder)
    return {**shares(w), "done before the state was there": early, "the call waited for nothing": ahead}


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU")
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "values": {}}
    for contender in (dcp, ours):
        result["values"][contender.__name__] = contender()
        print(contender.__name__, result["values"][contender.__name__], flush=True)
    if a.out:
        a.out.write_text(json.dumps(result, indent=1))
    sys.stdout.flush()
    os._exit(0 if result["values"]["ours"]["1"] == 1.0 else 1)


if __name__ == "__main__":
    main()
