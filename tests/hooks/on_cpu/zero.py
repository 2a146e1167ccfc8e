"""Runs a script of DeepSpeed's on a CPU without a compiler: there its `init_distributed` builds an extension, for minutes.
Its Muon optimizer, which nobody uses here, is wrapped by torch.compile when it is imported: seconds for each rank.

python -m tests.hooks.on_cpu.zero SCRIPT [options]
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

import torch


def stand_in() -> None:
    """Leaves both out, in this process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # Not `from deepspeed.comm import torch`: that is torch itself.
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    compile_ = torch.compile
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    torch.compile = compile_


def main() -> None:
    stand_in()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
