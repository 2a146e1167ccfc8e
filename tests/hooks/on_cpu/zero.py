"""Runs a script of DeepSpeed's on a CPU without a compiler: there its `init_distributed` builds an extension, for minutes.

python -m tests.hooks.on_cpu.zero SCRIPT [options]
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys


def main() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    # Not `from deepspeed.comm import torch`: that is torch itself.
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
