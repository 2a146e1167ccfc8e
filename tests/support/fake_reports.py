"""Reports of evaluations that never ran, for pages, tables and their tests."""

from __future__ import annotations

import heapq
import random

from unbroken.evaluate.contracts import (
    Assignment,
    Check,
    Conditions,
    Metric,
    Report,
    SampleNote,
    Score,
    ScoreDone,
    WorkerSeen,
)

_SUBJECTS = (
    "arc_challenge arc_easy boolq csqa hellaswag openbookqa piqa siqa winogrande copa gsm8k math_algebra math_geometry "
    "math_number_theory humaneval mbpp drop squad triviaqa naturalqs coqa jeopardy lambada logiqa race_middle "
    "race_high agieval_law agieval_sat bbh_dates bbh_hyperbaton bbh_navigate bbh_snarks truthfulqa ifeval cmmlu_law "
    "cmmlu_physics ceval_stem ceval_humanities flores_fr_en flores_de_en wmt_zh_en xsum cnn_dm toxigen bbq crows "
    "anli_r1 anli_r2 anli_r3 rte cb wic wsc multirc record story_cloze sciq qasper narrativeqa longbench_qa ruler_4k "
    "theoremqa medmcqa"
)
TASKS: tuple[str, ...] = tuple(_SUBJECTS.split())
"""Names of a suite about as long as the published one."""


def fake_report(
    *, nodes: int = 1, gpus: int = 8, tasks: int = 63, cpus: int = 4, trouble: bool = True, seed: int = 3
) -> Report:
    """A report of list scheduling on made-up times: every kind of bar, note and error when `trouble` is set."""
    rng = random.Random(seed)
    start = 1_795_000_000.0
    names = [TASKS[i] if i < len(TASKS) else f"task_{i}" for i in range(tasks)]
    work = {n: rng.lognormvariate(3.6, 1.1) for n in names}
    shards = [
        (w / parts, n, i) for n, w in work.items() for parts in [max(1, round(w / 60))] for i in range(parts)
    ]
    shards.sort(reverse=True)
    fleet: list[tuple[float, str]] = []
    workers = []
    for node in range(nodes):
        for gpu in range(gpus):
            began = start + 0.4 + 0.1 * gpu
            fetch, load = 9.0 + node + (0.2 if gpu else 2.0), 5.0 + rng.random()
            starting = 1.0 + 0.2 * gpu
            ready = began + starting + fetch + load
            name = f"node-{node}/gpu-{gpu}"
            workers.append(
                WorkerSeen(name, f"node-{node}", (gpu,), began, fetch, load, ready, start_s=starting)
            )
            heapq.heappush(fleet, (ready, name))
    trials: list[Assignment] = []
    finished: dict[str, float] = {}
    for k, (seconds, name, block) in enumerate(shards):
        at, worker = heapq.heappop(fleet)
        took = seconds * rng.uniform(0.85, 1.2)
        outcome, why = "done", ""
        if trouble and k == 7:
            outcome, why, took = "lost", "the worker's process was killed (signal 9)", took * 0.4
            shards.append((seconds, name, block))
        elif trouble and k % 23 == 11:
            outcome = "shared"
        trials.append(Assignment(name, worker, (block,), at, at + took, took * 0.97, outcome, why, seconds))
        finished[name] = max(finished.get(name, 0.0), at + took)
        heapq.heappush(fleet, (at + took + 0.03, worker))
    end = max(t.ended for t in trials)
    workers = [WorkerSeen(**{**vars(w), "ended": end}) for w in workers]
    scores, errors, scorings = _scores(rng, names, finished, cpus, trouble)
    last = max(s.ended for s in scorings)
    total = sum(t.busy_s for t in trials)
    bound = total / len(workers) + min(w.load_s + w.fetch_s for w in workers)
    naive = sum(work.values()) / len(workers) * 1.1 + 20.0 * tasks / len(workers) + max(work.values())
    return Report(
        suite="core-63",
        model="llama-7b-fake",
        checkpoint="5f2c9a1e0b7d4c3388aa21fe90c1d2e3",
        started=start,
        ended=last,
        scores=tuple(scores),
        errors=errors,
        trials=tuple(trials),
        scorings=tuple(scorings),
        workers=tuple(workers),
        lower_bound_s=bound,
        naive_s=naive,
        busy_fraction=total / (len(workers) * (end - start)),
        expected_s=bound * 1.04,
        groups=(Score("mmlu", (Metric("acc,none", 0.4712, 0.0041),), 14042, 14042),),
        licences={n: rng.choice(["MIT", "CC-BY-4.0", "Apache-2.0"]) for n in names},
        checks=tuple(_check(n, i) for i, n in enumerate(names)),
    )


def _check(name: str, i: int) -> Check:
    """Most tasks are the same both ways; some differ, one of them by more than chance, one is drawn, one was not compared."""
    if i == 5:
        return Check(name, 0, why="the worker died while answering it")
    if i == 9:
        return Check(name, 16, tuple(range(16)), True, 0.0, "exact_match,none", 0.25, 0.3125, 0.11, 0.62)
    if i == 12:
        return Check(name, 16, tuple(range(0, 28, 2)), False, 0.4, "acc,none", 0.125, 0.875, 0.11, 1e-6, True)
    if i % 11 == 3:
        return Check(name, 16, (7, 41), False, 0.03, "acc,none", 0.5625, 0.5, 0.0625, 0.5)
    return Check(name, 16, (), False, 2e-4, "acc,none")


def _scores(
    rng: random.Random, names: list[str], finished: dict[str, float], cpus: int, trouble: bool
) -> tuple[list[Score], dict[str, str], list[ScoreDone]]:
    usual = Conditions("transformers 5.24.0, torch 2.13.0", "NVIDIA H100 80GB HBM3", "bfloat16", 16, "left")
    scores, scorings = [], []
    errors: dict[str, str] = {}
    free = [0.0] * cpus
    for n in sorted(names, key=lambda n: finished[n]):
        cpu = free.index(min(free))
        at = max(finished[n] + 0.05, free[cpu])
        took = 40.0 if n in ("humaneval", "mbpp") else rng.uniform(0.6, 4.0)
        free[cpu] = at + took
        size = rng.randint(40, 9000)
        if trouble and n == "xsum":
            errors[n] = "the scorer raised ZeroDivisionError: division by zero (score.py:14)"
            scorings.append(ScoreDone(n, f"cpu-{cpu}", at, at + took, None, errors[n]))
            continue
        notes: tuple[SampleNote, ...] = ()
        if trouble and n == "truthfulqa":
            why = "HTTP 429: too many requests (attempt 6 of 6)"
            notes = tuple(SampleNote(i, "unscored", why) for i in range(0, 60, 5))
        value = rng.uniform(0.2, 0.9)
        metrics = [Metric("acc,none", value, (value * (1 - value) / size) ** 0.5)]
        if rng.random() < 0.5:
            metrics.append(Metric("acc_norm,none", min(1.0, value * 1.05), metrics[0].stderr))
        if n == "lambada":
            metrics = [Metric("perplexity,none", 23.0355, 1.7013, higher_is_better=False), metrics[0]]
        ran = (
            (usual, Conditions(**{**vars(usual), "batch_size": 8})) if n == "qasper" and trouble else (usual,)
        )
        score = Score(
            n, tuple(metrics), size, size - len(notes), notes, "lm_eval 0.4.13, task 1.0, 3c1b9a7d22e0", "5f2c9a1e",
            "9b1d" * 8, ran, (), took,
        )  # fmt: skip
        scores.append(score)
        scorings.append(ScoreDone(n, f"cpu-{cpu}", at, at + took, score))
    return scores, errors, scorings
