"""The contenders with real processes: a real transformers model, tasks generated here, the same harness code in every contender.

The model is a Llama of random weights (nobody needs its answers to be right; their cost is that of any Llama of its
size), with a byte tokenizer, both made here: no network. The tasks are some of the 63 datasets in miniature: requests
per row, characters, tokens and metric time as in the table of evaluation_suite.py, rows as many as make the whole take
`--seconds` of inference per worker on this device (measured first). A metric waits for its time and computes nothing, in
every contender: on a machine whose CPU workers also infer, real metrics would take from them. The suite says of each task what a
suite file would: lengths, and the time of its metric; how long inference takes is found out as it goes. Remote storage is a
file copy held to `--link` Gb/s, shared by all who copy at the time; the default makes one copy as long as 14 GB at 25 Gb/s.
Every contender sees the same link, the same files, and builds prompts, infers and scores with the same functions; they are all
here, which makes this file long, so that this can be seen.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evaluation_suite import ROWS, Row

from unbroken.evaluate.contracts import Answer, ModelSpec, PreparedTask, Suite, Task, TaskPrior
from unbroken.evaluate.model.sources import open_source
from unbroken.journal.codec import decode, encode

MODELS = {"tiny": (128, 2, 4, 352), "small": (1024, 8, 16, 2816), "medium": (2048, 16, 16, 5632)}
"""Hidden size, layers, heads, intermediate size: 0.5 M, 0.1 B and 0.8 B parameters."""
GB = 14e9
BLOCK = {"cpu": 8, "gpu": 32}

INFER = """
def prompt(row):
    if row["choices"]:
        return {"context": row["text"], "choices": row["choices"]}
    return {"prompt": row["text"], "max_tokens": row["tokens"], "stop": []}
"""
SCORE = """
import time
def score(row, output):
    time.sleep(row["score_s"])
    if row["choices"]:
        if len(row["choices"]) == 1:
            return float(output[0])
        return int(max(range(len(output)), key=lambda i: output[i][0]) == row["answer"])
    return int(len(str(output)) % 2 == row["answer"] % 2)
"""


def real_contenders(given: argparse.Namespace) -> dict[str, Any]:
    """Runs the contenders one after the other on the same tasks; returns their times and the checks."""
    from unbroken.evaluate.engines.local import count_gpus

    gpus = count_gpus() if given.gpus is None else given.gpus
    on_gpu = gpus > 0 and given.workers is None
    workers = gpus if on_gpu else given.workers or 2
    name = given.model or ("medium" if on_gpu else "tiny")
    count = given.datasets or 6
    seconds = given.seconds or (
        budgeted(given.budget, given.contenders.split(","), workers, count) if on_gpu else 15.0
    )
    print(
        f"{workers} {'GPUs' if on_gpu else 'CPU workers'}, {count} datasets, {seconds:.0f} s of inference per worker and contender",
        flush=True,
    )
    base = Path(os.environ.get("TMPDIR", "/tmp")) / "unbroken-bench"
    base.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="eval-", dir=base))
    try:
        model = work / "remote" / "model"
        device = make_model(model, name, on_gpu)
        size = sum(f.stat().st_size for f in model.iterdir())
        rate = given.link * 1e9 / 8 if given.link else size / (GB / (25e9 / 8))
        spec = ModelSpec(
            str(model),
            backend="transformers",
            name="bench",
            dtype="bfloat16" if on_gpu else "float32",
            batch_size=16 if on_gpu else 4,
            block=BLOCK["gpu" if on_gpu else "cpu"],
        )
        rates = measure_rates(spec, on_gpu)
        suite = make_tasks(work / "tasks", choose(count), rates, seconds * workers)
        found: dict[str, Any] = {
            "device": device, "workers": workers, "model": name, "model_bytes": size, "link_bytes_s": rate, "datasets": count,
            "rows": {t.name: count_rows(t) for t in suite.tasks}, "arms": [],
        }  # fmt: skip
        scores: dict[str, dict[str, Any]] = {}
        for contender in given.contenders.split(","):
            run = run_ours if contender == "ours" else run_trials
            print(f"{contender} ...", flush=True)
            row, scores[contender] = run(contender, work / contender, suite, spec, workers, on_gpu, rate)
            found["arms"].append(row)
            so_far(given.out).parent.mkdir(parents=True, exist_ok=True)
            so_far(given.out).write_text(json.dumps(found, indent=1))
            print(
                "  " + json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}),
                flush=True,
            )
        found["checks"] = checks(found["arms"], scores)
        so_far(given.out).unlink(missing_ok=True)
        return found
    finally:
        shutil.rmtree(work, ignore_errors=True)


def so_far(out: Path) -> Path:
    """Where the contenders that have run are kept, should a time limit cut the rest off."""
    return out / "evaluation-real-so-far.json"


def budgeted(budget_s: float, contenders: Sequence[str], workers: int, count: int) -> float:
    """Seconds of inference per worker so that all contenders fit: 40 s for model and rates, 12 s to start ours, 14 s a trial."""
    fixed = 40.0 + sum(12.0 if a == "ours" else 14.0 * -(-count // workers) for a in contenders)
    return max(30.0, (budget_s - fixed) / len(contenders))


def count_rows(task: Task) -> int:
    """Rows of a task's data."""
    return (Path(task.target) / "data.jsonl").read_bytes().count(b"\n")


def checks(contenders: Sequence[dict[str, Any]], scores: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """What must hold."""
    found: dict[str, bool] = {}
    mine = next((a for a in contenders if a["arm"] == "ours"), None)
    if mine is not None:
        found[
            "workers busy with inference >= 90 % of the time until the last is free, fetch and start included"
        ] = mine["busy until free"] >= 0.90
        found["within 1.10x of the lower bound from the measured times of shards and metrics"] = (
            mine["over bound"] <= 1.10
        )
        found["idle gap between shards below 50 ms"] = mine["gap_max_s"] < 0.05
        for a in contenders:
            if a is not mine:
                found[f"shorter than {a['arm']}"] = mine["makespan_s"] < a["makespan_s"]
    if len(scores) > 1:
        first = next(iter(scores.values()))
        found["the same scores in every contender"] = all(s == first for s in scores.values())
    return found


# ------------------------------------------------------------------------------------------- what is evaluated


def make_model(folder: Path, name: str, on_gpu: bool) -> str:
    """Writes a Llama of random weights and a byte tokenizer; returns the device's name."""
    code = f"""
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers, decoders
hidden, layers, heads, inter = {MODELS[name]}
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
vocab = {{c: i for i, c in enumerate(alphabet)}} | {{"<s>": 256, "</s>": 257}}
t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", pad_token="</s>").save_pretrained(sys.argv[1])
torch.manual_seed(0)
device = "cuda" if {on_gpu} else "cpu"
with torch.device(device):
    m = LlamaForCausalLM(LlamaConfig(vocab_size=258, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=inter, max_position_embeddings=4096, bos_token_id=256, eos_token_id=257, pad_token_id=257))
m.generation_config.eos_token_id = None  # random weights never mean to stop: every answer has its full length
m.to(torch.bfloat16 if {on_gpu} else torch.float32).save_pretrained(sys.argv[1])
print(torch.cuda.get_device_name(0) if {on_gpu} else "cpu")
"""
    folder.mkdir(parents=True)
    out = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    if out.returncode:
        raise SystemExit(f"the model could not be made:\n{out.stderr[-2000:]}")
    return out.stdout.strip().splitlines()[-1]


def choose(count: int) -> list[Row]:
    """Evenly over the datasets by their time, with HumanEval for its metric."""
    ordered = sorted(ROWS, key=lambda r: r.seconds)
    step = len(ordered) / count
    picked = [ordered[min(len(ordered) - 1, int((i + 0.5) * step))] for i in range(count)]
    human = next(r for r in ROWS if r.name == "humaneval")
    return picked if human in picked else [*picked[:-1], human] if picked[-1].tokens else [human, *picked[1:]]


def measure_rates(spec: ModelSpec, on_gpu: bool) -> dict[str, float]:
    """Seconds per character read and per token written on this device, in batches: in a process of its own."""
    out = subprocess.run([sys.executable, str(Path(__file__)), "rates", json.dumps(encode(spec)), "0" if on_gpu else ""],
                         capture_output=True, text=True, check=False, env=environment([0] if on_gpu else []))  # fmt: skip
    if out.returncode:
        raise SystemExit(f"the model does not run:\n{out.stderr[-2000:]}")
    return dict(json.loads(out.stdout.strip().splitlines()[-1]))


def make_tasks(folder: Path, rows: Sequence[Row], rates: dict[str, float], seconds: float) -> Suite:
    """Writes the tasks; as many rows each as give `seconds` in all, divided between them as in the table."""
    whole = sum(r.seconds for r in rows)
    tasks, priors = [], {}
    for r in rows:
        chars, tokens = min(r.chars, 1500), min(r.tokens, 48)
        requests = 1 if tokens else r.requests
        each = (chars * requests if not tokens else chars) * rates["char"] + tokens * rates["token"]
        n = max(4, round(seconds * (r.seconds / whole) / each))
        metric = r.score_s * seconds / whole / n
        place = folder / r.name
        place.mkdir(parents=True)
        with open(place / "data.jsonl", "w") as f:
            for i in range(n):
                text = (f"{r.name} {i}: " + "the quick brown fox jumps over the lazy dog. " * 64)[:chars]
                choices = [] if tokens else [f" answer {j}" for j in range(requests)]
                f.write(
                    json.dumps(
                        {
                            "text": text,
                            "choices": choices,
                            "tokens": tokens,
                            "answer": i % max(1, requests),
                            "score_s": metric,
                        }
                    )
                    + "\n"
                )
        (place / "infer.py").write_text(INFER)
        (place / "score.py").write_text(SCORE)
        tasks.append(Task(r.name, "plain", str(place)))
        priors[r.name] = TaskPrior(
            n, requests, float(chars * requests if not tokens else chars), float(tokens), score_s=metric * n
        )
    return Suite("bench", tuple(tasks), priors=priors, folder=str(folder))


# ------------------------------------------------------------------------------------------------- the link


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """A turn on the link."""
    with open(lock, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def copy_over_link(source: Path, target: Path, rate: float, lock: Path) -> None:
    """Copies a folder at `rate` bytes/s, which all that copy at the time share in turns of 1/50 s."""
    target.mkdir(parents=True, exist_ok=True)
    piece = max(1 << 16, int(rate / 50))
    for file in sorted(source.iterdir()):
        with open(file, "rb") as f, open(target / file.name, "wb") as out:
            while data := f.read(piece):
                with turn(lock):
                    began = time.monotonic()
                    out.write(data)
                    time.sleep(max(0.0, len(data) / rate - (time.monotonic() - began)))


# ------------------------------------------------------------------------------------------------- the contenders


class LinkedSource:
    """The model's folder as remote storage: each read takes its turn on the link."""

    def __init__(self, inner: Any, rate: float, lock: Path) -> None:
        self.inner, self.rate, self.lock = inner, rate, lock
        self.address = inner.address
        self.files = inner.files
        self.last_read = 0.0

    def read(self, name: str, offset: int, size: int) -> bytes:
        """In pieces of 1/50 s, as `copy_over_link`."""
        piece = max(1 << 16, int(self.rate / 50))
        found: list[bytes] = []
        while size:
            with turn(self.lock):
                began = time.monotonic()
                data = self.inner.read(name, offset, min(piece, size))
                time.sleep(max(0.0, len(data) / self.rate - (time.monotonic() - began)))
            if not data:
                break
            found.append(data)
            offset, size = offset + len(data), size - len(data)
        self.last_read = time.time()
        return b"".join(found)


def run_ours(
    contender: str, out: Path, suite: Suite, spec: ModelSpec, workers: int, on_gpu: bool, rate: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`unbroken eval`: the model comes over the link once, into shared memory, by its own cache; the time for that counts."""
    from unbroken.evaluate.engines import Slot
    from unbroken.evaluate.engines.local import LocalEngine
    from unbroken.evaluate.model import locate
    from unbroken.evaluate.model.cache import Places
    from unbroken.evaluate.result.folder import EvalDir
    from unbroken.evaluate.run.coordinator import Coordinator
    from unbroken.evaluate.run.job import Job, Launchers
    from unbroken.evaluate.run.settings import Settings

    folder = EvalDir(out)
    size = sum(f.stat().st_size for f in Path(spec.source).iterdir())
    roomy = (
        os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 1.2 * size
    )  # containers often have 64 MB
    memory = Path(tempfile.mkdtemp(prefix="unbroken-bench-", dir="/dev/shm" if roomy else out.parent))
    try:
        began = time.time()
        # The coordinator fetches, and workers find its copy: only its reads go over the link.
        linked = LinkedSource(locate.open_source(spec.source), rate, out.parent / "link")
        locate.open_source = lambda _: linked  # type: ignore[assignment]
        slots = tuple(Slot(f"w{i}", (i,) if on_gpu else (), 1 if on_gpu else 0) for i in range(workers))
        settings = Settings(
            slots=slots,
            # Here a metric only waits, so two of them take nothing from two CPU workers.
            cpu_workers=max(2, (os.cpu_count() or 2) - workers),
            prepare_workers=2,
            cache="always",
            places=Places(memory),
            load_s=15.0,
        )
        engine = LocalEngine(out / "logs", threads=None if on_gpu else 1)
        report = Coordinator(Job(suite, spec, folder), Launchers(engine), settings).run()
        fetched = linked.last_read - began
    finally:
        locate.open_source = open_source
        shutil.rmtree(memory, ignore_errors=True)
    if report.errors:
        raise SystemExit(f"ours failed: {dict(report.errors)}")
    if unscored := {s.task: s.notes[0].why for s in report.scores if s.notes}:
        raise SystemExit(f"samples without a score, so that nothing can be compared: {unscored}")
    gaps = sorted(gaps_of(report)) or [0.0]
    makespan = report.ended - began
    busy, gpu_end = sum(t.busy_s for t in report.trials), max(t.ended for t in report.trials)
    load = min((w.ready - w.started for w in report.workers if w.ready), default=0.0)
    work = (
        report.lower_bound_s - load
    )  # of the measured times of blocks and metrics alone: no fetch, no start
    logs = [line for log in sorted((out / "logs").glob("w*.log")) for line in log.read_text().splitlines()]
    print("  " + "; ".join(line.removeprefix("unbroken eval worker: ") for line in logs if " took " in line))
    row = {
        "arm": contender, "makespan_s": makespan, "gpu_end_s": gpu_end - began, "fetch_s": fetched,
        "load_s": load, "of which imports and device left at its start": max((w.start_s for w in report.workers), default=0.0),
        "lower_bound_s": work, "over bound": makespan / work, "over bound with fetch and load": makespan / (fetched + load + work),
        "busy until free": busy / workers / (gpu_end - began), "busy of makespan": busy / workers / makespan, "in memory": roomy, "loads": len(report.workers),
        "trials": len(report.trials), "gap_median_s": gaps[len(gaps) // 2], "gap_max_s": gaps[-1], "naive_s": report.naive_s,
    }  # fmt: skip
    return row, {s.task: [[m.name, m.value, m.stderr] for m in s.metrics] for s in report.scores}


def gaps_of(report: Any) -> list[float]:
    """Seconds between two shards on a worker, all of them, those in which it had to wait for more work too."""
    found: list[float] = []
    for name in {t.worker for t in report.trials}:
        mine = sorted((t for t in report.trials if t.worker == name), key=lambda t: t.started)
        found += [max(0.0, b.started - a.ended) for a, b in itertools.pairwise(mine)]
    return found


def run_trials(
    contender: str, out: Path, suite: Suite, spec: ModelSpec, workers: int, on_gpu: bool, rate: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One process per trial, the model over the link and loaded in each; `workers` at a time, in the suite's order."""
    out.mkdir(parents=True)
    queue = split(contender, suite, workers)
    began = time.time()
    running: dict[int, subprocess.Popen[bytes]] = {}
    for i, pieces in enumerate(queue):
        while len(running) == workers:
            _reap(running)
            time.sleep(0.02)
        place = next(w for w in range(workers) if w not in running)
        job = {"suite": encode(suite), "spec": encode(spec), "pieces": pieces, "rate": rate, "link": str(out.parent / "link"),
               "metrics": contender == "baseline", "out": str(out), "index": i}  # fmt: skip
        log = open(out / f"trial-{i}.log", "wb")  # noqa: SIM115  given to the child
        running[place] = subprocess.Popen([sys.executable, str(Path(__file__)), "trial", json.dumps(job), "0" if on_gpu else ""],
                                          env=environment([place] if on_gpu else []), stdout=log, stderr=log)  # fmt: skip
    while running:
        _reap(running)
        time.sleep(0.02)
    gpu_end = time.time()
    if contender != "baseline":
        score_apart(out, suite, spec, max(1, (os.cpu_count() or 2) - 1))
    ended = time.time()
    trials = [json.loads(p.read_text()) for p in out.glob("trial-*.json")]
    if len(trials) != len(queue):
        raise SystemExit(
            f"{contender}: {len(queue) - len(trials)} trials failed; the last log: {max(out.glob('trial-*.log')).read_text()[-1500:]}"
        )
    busy = sum(t["infer_s"] for t in trials)
    row = {
        "arm": contender,
        "makespan_s": ended - began,
        "gpu_end_s": gpu_end - began,
        "busy until free": busy / workers / (gpu_end - began),
        "busy of makespan": busy / workers / (ended - began),
        "load_s": min(t["load_s"] for t in trials),
        "loads": len(trials),
        "trials": len(trials),
    }
    return row, {p.stem.removeprefix("score-"): json.loads(p.read_text()) for p in out.glob("score-*.json")}


def split(contender: str, suite: Suite, workers: int) -> list[list[tuple[str, int, int]]]:
    """Trials as lists of (task, first block, last block + 1); blocks are resolved when the task is prepared."""
    names = [t.name for t in suite.tasks]
    if contender == "baseline":
        return [[(n, 0, -1)] for n in names]
    if contender == "opencompass-workers":
        return [[(n, -i - 1, -workers) for n in names] for i in range(workers)]
    rows = {t.name: count_rows(t) for t in suite.tasks}
    tokens = {r.name: r.tokens for r in ROWS}
    cost = {n: rows[n] * (20 if tokens[n] else 4) for n in names}
    limit = max(
        sum(cost.values()) / max(1, len(names) / 3), 1
    )  # scaled like the rows: about three datasets a task
    bundles: list[list[tuple[str, int, int]]] = []
    bundle: list[tuple[str, int, int]] = []
    held = 0.0
    for n in sorted(names, key=lambda n: -cost[n]):
        if held + cost[n] > limit and bundle:
            bundles.append(bundle)
            bundle, held = [], 0.0
        bundle.append((n, 0, -1))
        held += cost[n]
    return [*bundles, bundle] if bundle else bundles


def _reap(running: dict[int, subprocess.Popen[bytes]]) -> None:
    for place, process in list(running.items()):
        if process.poll() is not None:
            del running[place]


def environment(gpus: Sequence[int]) -> dict[str, str]:
    """Of a trial: its GPU, one CPU thread where it has none."""
    from unbroken.evaluate.engines.local import visible

    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    )
    env = {
        **os.environ,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "CUDA_VISIBLE_DEVICES": ",".join(visible(gpus)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return env if gpus else {**env, "OMP_NUM_THREADS": "1"}


# ----------------------------------------------------------------------------------------- inside a trial


def trial(job: dict[str, Any], gpus: Sequence[int]) -> None:
    """What the baseline's GPU job does: copy, load, prepare, infer and, if asked, score."""
    from unbroken.evaluate.suite.registry import get_backend, get_harness
    from unbroken.evaluate.suite.staged import encode_answer

    out, index = Path(job["out"]), job["index"]
    suite, spec = decode(Suite, job["suite"]), decode(ModelSpec, job["spec"])
    local = out / f"model-{index}"
    copy_over_link(Path(spec.source), local, job["rate"], Path(job["link"]))
    began_load = time.time()
    model = get_backend(spec.backend).load(spec, local, gpus)
    load_s = time.time() - began_load
    tasks = {t.name: t for t in suite.tasks}
    infer_s = 0.0
    for name, first, last in job["pieces"]:
        harness = get_harness("plain")
        prepared = harness.prepare(tasks[name], suite, spec, local, out / f"prepared-{index}" / name)
        blocks = range(-first - 1, prepared.blocks, -last) if first < 0 else range(prepared.blocks)
        began = time.time()
        answers: list[Answer] = []
        for block in blocks:
            answers += harness.run(model, prepared, harness.build_requests(prepared, block))
        infer_s += time.time() - began
        (out / f"answers-{index}-{name}.jsonl").write_text("".join(encode_answer(a) + "\n" for a in answers))
        if job["metrics"]:
            save_score(out, name, prepared, answers)
    shutil.rmtree(local, ignore_errors=True)
    (out / f"trial-{index}.json").write_text(json.dumps({"infer_s": infer_s, "load_s": load_s}))


def save_score(out: Path, name: str, prepared: PreparedTask, answers: Sequence[Answer]) -> None:
    """The harness's own score."""
    from unbroken.evaluate.suite.registry import get_harness

    score = get_harness("plain").score(prepared, answers)
    (out / f"score-{name}.json").write_text(json.dumps([(m.name, m.value, m.stderr) for m in score.metrics]))


def score_apart(out: Path, suite: Suite, spec: ModelSpec, workers: int) -> None:
    """After all inference, `workers` processes at a time."""
    running: list[subprocess.Popen[bytes]] = []
    for t in suite.tasks:
        while len(running) >= workers:
            running = [p for p in running if p.poll() is None]
            time.sleep(0.02)
        job = json.dumps({"suite": encode(suite), "spec": encode(spec), "task": t.name, "out": str(out)})
        running.append(
            subprocess.Popen([sys.executable, str(Path(__file__)), "score", job, ""], env=environment([]))
        )
    for p in running:
        p.wait()


def score(job: dict[str, Any]) -> None:
    """One scoring process."""
    from unbroken.evaluate.suite.registry import get_harness
    from unbroken.evaluate.suite.staged import read_answers

    out, suite = Path(job["out"]), decode(Suite, job["suite"])
    task = next(t for t in suite.tasks if t.name == job["task"])
    prepared = get_harness("plain").prepare(
        task, suite, decode(ModelSpec, job["spec"]), None, out / "prepared-score" / task.name
    )
    answers = [a for p in out.glob(f"answers-*-{task.name}.jsonl") for a in read_answers(p)]
    save_score(out, task.name, prepared, sorted(answers, key=lambda a: a.sample))


def rates(spec: ModelSpec, gpus: Sequence[int]) -> dict[str, float]:
    """Seconds per character and token, measured on one block of each kind, the second time."""
    from unbroken.evaluate.contracts import Request
    from unbroken.evaluate.suite.registry import get_backend

    model = get_backend(spec.backend).load(spec, Path(spec.source), gpus)
    text = ("the quick brown fox jumps over the lazy dog. " * 64)[:1000]
    read = [Request("loglikelihood", (f"{i} {text}", " yes")) for i in range(spec.block)]
    write = [
        Request(
            "generate_until", (f"{i} {text[:200]}", {"until": [], "max_gen_toks": 48, "do_sample": False})
        )
        for i in range(spec.block)
    ]
    found = {}
    for name, requests, units in (("char", read, 1000.0), ("token", write, 48.0)):
        model.respond(requests)
        began = time.time()
        model.respond(requests)
        found[name] = (time.time() - began) / len(requests) / units
    return found


if __name__ == "__main__":
    what, text, devices = sys.argv[1], json.loads(sys.argv[2]), [int(g) for g in sys.argv[3].split(",") if g]
    if what == "trial":
        trial(text, devices)
    elif what == "score":
        score(text)
    else:
        print(json.dumps(rates(decode(ModelSpec, text), devices)))
