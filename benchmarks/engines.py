"""`unbroken eval` against lm_eval's own model class on the same engine, the same suite of six tasks and the same model.

    python benchmarks/engines.py --engine vllm        # in an environment of scripts/install_vllm_cpu.sh, or with vLLM on a GPU
    python benchmarks/engines.py --engine hf          # transformers: ours the fast way, lm_eval's `hf` with automatic batch size
    python benchmarks/engines.py --engine hf --make 6b --device cuda:0 --dtype bfloat16 --suite six --documents 200

One contender after the other, each in processes of its own. `makespan` is from the first line of the command to the last score; `inference` is the
time inside the model's calls, `processor` the processor seconds of all processes (on a busy machine they say more). Texts are asked
for with do_sample=false on both sides: lm_eval 0.4.13's `vllm` class draws at temperature 1 where a task says nothing, its `hf` class and ours do not.
The result goes to benchmarks/results/engines-ENGINE-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machine import describe_machine, driver
from own_folders import use_own_folders
from suite_of_six import SIX, write_model, write_suite

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent)]


TINY = ("tiny_sums", "tiny_choice", "tiny_translate", "tiny_rolling", "tiny_several", "tiny_cloze")

THEIRS = """
import importlib.metadata, json, sys, time
found_version = importlib.metadata.version
# lm_eval asks for the version of the package `vllm`, which vllm-cpu is not called; vLLM itself looks for `cpu` in the answer.
lacks_vllm = not list(importlib.metadata.Distribution.discover(name="vllm"))
importlib.metadata.version = lambda name: found_version("vllm-cpu") + "+cpu" if name == "vllm" and lacks_vllm else found_version(name)
import lm_eval, lm_eval.api.registry as registry
from lm_eval.tasks import TaskManager
engine, arguments, tasks, names, batch, device, limit = sys.argv[1:8]
if __name__ == "__main__":
    kind, spent = registry.get_model(engine), {"inference": 0.0, "batch size": 0.0}
    def timed(method, what):
        def call(self, *given, **more):
            began = time.perf_counter()
            try:
                return method(self, *given, **more)
            finally:
                spent[what] += time.perf_counter() - began
                print("CALL", what, method.__name__, round(time.perf_counter() - began, 1), flush=True)
        return call
    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(kind, name, timed(getattr(kind, name), "inference"))
    if hasattr(kind, "_detect_batch_size"):  # what `auto` takes to find the largest batch: a part of its inference
        kind._detect_batch_size = timed(kind._detect_batch_size, "batch size")
    manager = TaskManager(include_path=tasks, include_defaults=False)
    more = {} if engine == "vllm" else {"device": device}
    found = lm_eval.simple_evaluate(engine, json.loads(arguments), tasks=names.split(","), task_manager=manager, bootstrap_iters=20,
                                    batch_size=batch, gen_kwargs={"do_sample": False}, limit=int(limit) or None, **more)
    rows = {t: {k: v for k, v in r.items() if "," in k and "stderr" not in k} for t, r in found["results"].items()}
    errors = {t: {k.replace("_stderr", ""): v for k, v in r.items() if "_stderr," in k} for t, r in found["results"].items()}
    print("RESULT " + json.dumps({"inference_s": spent["inference"], "batch_size_s": spent["batch size"], "scores": rows, "stderrs": errors}))
"""


def ours(place: Path, model: str, engine: str, on_gpu: bool, dtype: str) -> dict[str, Any]:
    """One run of the command, in a new folder."""
    backend = "vllm" if engine == "vllm" else "transformers"
    command = [sys.executable, "-m", "unbroken", "eval", "run", str(place / "suite.toml"), "-m", model, "-o", str(place / "out"), "--backend",
               backend, "--dtype", dtype, "--priors", "none", "--json", "--gen", "do_sample=false", *(["--gpus", "1"] if on_gpu else ["--workers", "1"])]  # fmt: skip
    began, before = time.perf_counter(), processor_s()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    took, processor = time.perf_counter() - began, processor_s() - before
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    report = json.loads((place / "out" / "report.json").read_text())
    scores = {s["task"]: {m["name"]: m["value"] for m in s["metrics"]} for s in report["scores"]}
    checks = {c["task"]: [len(c["differ"]), c["samples"], c["beyond_chance"]] for c in report["checks"]}
    busy = sum(t["busy_s"] for t in report["trials"] if not t["task"].endswith("--exact"))
    return {"makespan_s": took, "processor_s": processor, "inference_s": busy, "scores": scores, "differ": checks,
            "load_s": report["workers"][0]["load_s"], "check_s": sum(t["busy_s"] for t in report["trials"]) - busy}  # fmt: skip


def theirs(
    place: Path, model: str, engine: str, device: str, dtype: str, batch: str, tasks: str, patience: float, limit: int = 0
) -> dict[str, Any]:  # fmt: skip
    """lm_eval alone, in one process. Where it takes longer than `patience` seconds: how far it came, and that it took at least those."""
    arguments: dict[str, Any] = {"pretrained": model, "dtype": dtype}
    if engine == "vllm":
        arguments |= {"enforce_eager": device == "cpu"}
    (place / "theirs.py").write_text(THEIRS)
    began, before = time.perf_counter(), processor_s()
    try:
        done = subprocess.run([sys.executable, str(place / "theirs.py"), engine, json.dumps(arguments), str(place / "tasks"), tasks, batch,
                               device, str(limit)], capture_output=True, text=True, check=False, env=environment(), timeout=patience)  # fmt: skip
    except subprocess.TimeoutExpired as e:
        text = (e.stdout or b"").decode(errors="replace")
        print("lm_eval is not done:", text[-2000:], flush=True)
        return {
            "makespan_s": patience,
            "done": False,
            "calls": [x for x in text.splitlines() if x.startswith("CALL ")],
        }
    took, processor = time.perf_counter() - began, processor_s() - before
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(done.stderr[-3000:])
    calls = [x for x in done.stdout.splitlines() if x.startswith("CALL ")]
    return {
        "makespan_s": took,
        "processor_s": processor,
        "done": True,
        "calls": calls,
        **json.loads(line.removeprefix("RESULT ")),
    }


def processor_s() -> float:
    """Of all children that have ended, and of theirs."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def environment() -> dict[str, str]:
    """Without a network; vLLM on a CPU with little memory, in one process."""
    paths = os.pathsep.join(
        [str(HERE.parent / "src"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip


def main() -> int:
    """Runs both and says whether the targets are reached."""
    use_own_folders()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "hf"), default="hf")
    parser.add_argument(
        "--model", default="", help="a folder; default: a tiny one with heads of 64, made here"
    )
    parser.add_argument(
        "--make",
        default="",
        choices=("", "1b", "6b"),
        help="a model of random weights of this size, made on the GPU",
    )
    parser.add_argument(
        "--suite", default="tiny", choices=("tiny", "six"), help="six: prompts and answers of real lengths"
    )
    parser.add_argument("--shorter", type=float, default=1.0, help="lengths of --suite six times this")
    parser.add_argument("--out", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--keep", default="", help="a folder for what our run leaves behind: page, report, workers' logs"
    )
    parser.add_argument("--documents", type=int, default=60, help="of each task")
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds that lm_eval may take")
    parser.add_argument("--batch", default="", help="lm_eval's --batch_size; default: auto, on a CPU 8")
    given = parser.parse_args()
    from tests.support.tiny_model import write_tiny_model
    from tests.support.tiny_tasks import write_tiny_tasks

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tasks = TINY if given.suite == "tiny" else SIX
        if given.make:
            model = str(write_model(place / "model", given.make))
        else:
            context = 512 if given.suite == "tiny" else 4096
            model = given.model or str(write_tiny_model(place / "model", hidden=256, context=context))
        if given.suite == "tiny":
            write_tiny_tasks(place / "tasks", documents=given.documents)
        else:
            write_suite(place / "tasks", given.documents, shorter=given.shorter)
        print("written", flush=True)
        row = '[[task]]\nname = "{}"\n[task.options]\ninclude = "tasks"\nbootstrap_iters = 20\n'
        (place / "suite.toml").write_text('[suite]\nname = "six"\n' + "\n".join(map(row.format, tasks)))
        on_gpu = given.device != "cpu"
        batch = given.batch or ("auto" if on_gpu or given.engine == "vllm" else "8")
        everything = ",".join(tasks)
        if given.engine == "vllm":
            # vLLM keeps what it saw of a kind of model and what torch's compiler made for it: whoever comes first would pay for that.
            theirs(
                place,
                model,
                given.engine,
                given.device,
                given.dtype,
                batch,
                everything,
                given.patience,
                limit=8,
            )
        found = {"ours": ours(place, model, given.engine, on_gpu, given.dtype)}
        print("ours", json.dumps(found["ours"]), flush=True)
        if given.keep:
            Path(given.keep).mkdir(parents=True, exist_ok=True)
            for name in ("report.html", "report.json", "table.txt"):
                shutil.copy(place / "out" / name, given.keep)
            shutil.copytree(place / "out" / "logs", Path(given.keep) / "logs", dirs_exist_ok=True)
        found["lm_eval"] = theirs(
            place, model, given.engine, given.device, given.dtype, batch, everything, given.patience
        )
        print("lm_eval", json.dumps(found["lm_eval"]), flush=True)
    a, b = found["ours"], found["lm_eval"]
    result = {
        "machine": describe_machine(), "engine": given.engine, "device": given.device, "dtype": given.dtype, "documents": given.documents,
        "lm_eval_batch": batch, **found, **compare(a, b, given.dtype),
    }  # fmt: skip
    if on_gpu:
        import torch

        result |= {
            "gpu": torch.cuda.get_device_name(),
            "driver": driver(),
            "torch": torch.__version__,
            "model": given.make or given.model,
        }
    name = f"engines-{given.engine}-{'cpu' if not on_gpu else 'gpu'}.json"
    out = Path(given.out) if given.out else HERE / "results" / name
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["compared"], indent=1), out)
    wanted = 2 if on_gpu and given.engine == "hf" else 1
    found_all = result["compared"]
    return 0 if found_all["makespan_ratio"] >= wanted and found_all["scores_are_the_same"] else 1


def compare(ours: dict[str, Any], theirs: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Ratios of times, and the scores that differ by more than rounding and by more than two standard errors."""
    ratio = theirs["makespan_s"] / ours["makespan_s"]
    if not theirs["done"]:  # lm_eval was not waited for: its makespan is a lower bound
        return {"compared": {"makespan_ratio": ratio, "at_least": True, "scores_are_the_same": False}}
    off = [
        d
        for d in differences(ours["scores"], theirs["scores"], theirs["stderrs"])
        if d["difference"] > ROUNDING
    ]
    beyond = [d for d in off if d["standard_errors"] is None or d["standard_errors"] > 2]
    if dtype != "float32":  # a perplexity without a standard error moves with the last bits of 16
        beyond = [d for d in beyond if d["standard_errors"] is not None or d["difference"] > ROUNDING_16]
    return {
        "compared": {
            "makespan_ratio": ratio, "at_least": False, "processor_ratio": theirs["processor_s"] / ours["processor_s"], "inference_ratio": theirs["inference_s"] / ours["inference_s"],
            "makespan_ratio_without_finding_a_batch_size": (theirs["makespan_s"] - theirs["batch_size_s"]) / ours["makespan_s"],
            "scores_that_differ": off, "scores_beyond_two_standard_errors": beyond, "scores_are_the_same": not beyond,
        }
    }  # fmt: skip


ROUNDING, ROUNDING_16 = 1e-4, 5e-3
"""Of a score by its size, at least 1: in float32; of perplexities in 16 bits."""


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], errors: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Each score of both: the difference by its size, and in standard errors of the harness's own score where it has one."""
    found = []
    for task, row in theirs.items():
        for metric, value in row.items():
            own, error = ours[task].get(metric), errors[task].get(metric)
            if not isinstance(value, float | int):
                continue
            off = abs(own - value) if isinstance(own, float | int) else math.inf
            known = isinstance(error, float | int) and error > 0
            found.append({"task": task, "metric": metric, "ours": own, "lm_eval": value, "difference": off / max(1.0, abs(value)),
                          "standard_errors": off / error if known else None})  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main())
