"""The fast way on a real (tiny) model: the harness's own answers but for rounding, whatever breaks in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (requirements/all.txt)")
pytest.importorskip("lm_eval", reason="lm-eval is not installed (make install-eval)")

from tests.evaluate.test_transformers import generations, pairs, rolling, text
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_tasks import write_tiny_tasks
from unbroken.errors import EvaluationError, OutOfMemory
from unbroken.evaluate.contracts import Json, ModelSpec, Request
from unbroken.evaluate.harness.fast.continuous import Broken, Continuous
from unbroken.evaluate.harness.fast.model import FastModel
from unbroken.evaluate.harness.transformers import TransformersBackend
from unbroken.evaluate.result.journal import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def fast(folder: Path, **options: Json) -> FastModel:
    spec = ModelSpec(str(folder), dtype="float32", exact=False, options=options)
    model = TransformersBackend().load(spec, folder, ())
    assert isinstance(model, FastModel)
    return model


def few_shot(questions: int = 20) -> list[Request]:
    import random

    rng = random.Random(3)
    shots = text(rng, 40, 40)
    found = []
    for _ in range(questions):
        context = f"{shots} {text(rng, 3, 12)}"
        found += [Request("loglikelihood", (context, f" {text(rng, 1, 4)}")) for _ in range(4)]
    return found


def alike(found: list[Json], wanted: list[Json]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        if isinstance(b, list):
            assert a[0] == pytest.approx(b[0], rel=1e-5, abs=1e-4) and a[1] == b[1]
        else:
            assert a == (pytest.approx(b, rel=1e-5) if isinstance(b, float) else b)


@pytest.mark.parametrize("tokens", [None, 64])
def test_the_harness_s_own_answers_but_for_rounding(folder: Path, tokens: int | None) -> None:
    model = fast(folder, **({"batch_tokens": tokens} if tokens else {}))
    everything = {"pairs": pairs(), "texts": generations(), "rolling": rolling(), "shots": few_shot()}
    for name, requests in everything.items():
        model.put(name, name, requests)
    found: dict[Any, Any] = {}
    while len(found) < len(everything):
        found.update(model.take())
    for name, requests in everything.items():
        alike(found[name], model.exact.respond(requests))
    assert model.tokens_read > 1000 and model.tokens_made > 0
    model.close()


def test_shared_prefixes_are_computed_once(folder: Path) -> None:
    model = fast(folder)
    read = 0
    forward = model.exact.model.forward

    def counted(ids: Any, **more: Any) -> Any:
        nonlocal read
        read += ids.numel()
        return forward(ids, **more)

    model.exact.model.forward = counted
    requests = few_shot()
    model.respond(requests)
    shared, read = read, 0
    model.exact.respond(requests)
    assert shared * 3 < read
    model.close()


def test_static_batches_give_the_same_texts(folder: Path) -> None:
    static = fast(folder, generation="static")
    alike(static.respond(generations(30)), static.exact.respond(generations(30)))
    assert static.steps == 0


def test_continuous_batching_that_breaks_in_the_middle_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fast(folder)
    take = Continuous.take
    calls = 0

    def broken(self: Continuous, within_s: float) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Broken("a kernel that this card has not")
        return take(self, within_s)

    monkeypatch.setattr(Continuous, "take", broken)
    alike(model.respond(generations(30)), model.exact.respond(generations(30)))
    assert calls == 3
    model.close()


def test_memory_that_runs_out_cuts_batches_until_they_fit(folder: Path) -> None:
    model = fast(folder, batch_tokens=4096)
    forward = model.exact.model.forward

    def small(ids: Any, **more: Any) -> Any:
        if ids.numel() > 600:
            raise model.exact.torch.OutOfMemoryError("no memory")
        return forward(ids, **more)

    wanted = model.exact.respond(pairs())
    model.exact.model.forward = small
    alike(model.respond(pairs()), wanted)
    assert model.conditions.batch_tokens < 4096
    model.exact.model.forward = lambda ids, **more: small(model.exact.torch.zeros(1000), **more)
    with pytest.raises(OutOfMemory):
        model.respond(pairs(1))


def test_a_request_that_nobody_can_answer_takes_no_other_with_it(folder: Path) -> None:
    model = fast(folder)
    model.put("good", "", pairs(3))
    model.put("bad", "", [*pairs(2), Request("dance", ("x",))])
    model.put("long", "", [Request("generate_until", ("x", {"max_gen_toks": 5000})), *generations(2)])
    found: dict[Any, Any] = {}
    while len(found) < 3:
        found.update(model.take())
    assert isinstance(found["bad"], EvaluationError) and "dance" in str(found["bad"])
    assert len(found["good"]) == 9 and "5000 tokens" in found["long"][0]["problem"]
    alike(found["long"][1:], model.exact.respond(generations(2)))
    model.close()


def write_place(folder: Path, *, documents: int, **model: Any) -> Path:
    """Six kinds of task, a suite of them, and a model, in one folder."""
    write_tiny_tasks(folder / "tasks", documents=documents)
    write_tiny_model(folder / "model", **model)
    row = '[[task]]\nname = "{}"\n[task.options]\ninclude = "tasks"\nbootstrap_iters = 20\n'
    names = ("tiny_sums", "tiny_choice", "tiny_translate", "tiny_rolling", "tiny_several", "tiny_cloze")
    (folder / "suite.toml").write_text('[suite]\nname = "six"\n' + "\n".join(map(row.format, names)))
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write_place(tmp_path, documents=90)


def command(place: Path, out: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "unbroken", "eval", "run", str(place / "suite.toml"), "-m", str(place / "model"), "-o", str(place / out),
            "--workers", "1", "--dtype", "float32", "--json", "--priors", "none", *more]  # fmt: skip


def env(place: Path) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "hf"), "XDG_STATE_HOME": str(place / "state"),
            "XDG_CACHE_HOME": str(place / "cache"), "OMP_NUM_THREADS": "1"}  # fmt: skip


def answered(out: Path) -> list[str]:
    return [line for f in out.glob("answers/*/*/*.jsonl") if "--exact" not in str(f) for line in f.read_text().splitlines()]  # fmt: skip


def run_and_kill(place: Path, at_once: int, *more: str) -> dict[str, Any]:
    """Evaluates into place/fast with one worker that has at most `at_once` samples in flight, kills it in the middle, and holds that
    whatever had come in by then was not asked again; what the command printed."""
    given = command(place, "fast", "--option", f"at_once={at_once}", *more)
    running = subprocess.Popen(given, env=env(place), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    out = place / "fast"
    until = time.monotonic() + 240
    while len(answered(out)) < 12:
        assert running.poll() is None and time.monotonic() < until, running.communicate()[1][-3000:]
        time.sleep(0.005)
    victim = next(e for e in events(out / "journal.jsonl") if e["event"] == "join")
    os.kill(victim["pid"], signal.SIGKILL)
    said, errors = running.communicate(timeout=400)
    assert running.returncode == 0, errors[-3000:]
    found: dict[str, Any] = json.loads(said)
    told = list(events(out / "journal.jsonl"))
    assert sum(e["event"] == "join" for e in told) == 2, "it ended before it was killed"
    # One line for each block: whatever had come in was not asked again.
    blocks = sum(e["blocks"] for e in told if e["event"] == "task")
    assert len(answered(out)) == blocks
    second = int(worker_logs(out).rpartition("ended after ")[2].split()[0])  # checks are among them
    assert second <= blocks + len(found["checks"]) - 12
    return found


def worker_logs(out: Path) -> str:
    return "".join(f.read_text() for f in sorted((out / "logs").glob("w*.log")))


def test_six_kinds_of_task_fast_and_exact_and_a_worker_killed_in_the_middle(place: Path) -> None:
    """No score is outside two standard errors of the difference, and a death costs at most what was in flight."""
    at_once = 8
    found = run_and_kill(place, at_once)
    exact = subprocess.run(
        command(place, "exact", "--exact"),
        env=env(place),
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    )
    wanted = {s["task"]: s["metrics"][0] for s in json.loads(exact.stdout)["scores"]}
    for s in found["scores"]:
        m, other = s["metrics"][0], wanted[s["task"]]
        allowed = 2 * 2**0.5 * (other["stderr"] or 0.0) + 1e-4 * abs(other["value"])
        assert abs(m["value"] - other["value"]) <= allowed, (s["task"], m, other)
    assert {c["task"] for c in found["checks"]} == set(wanted)
    assert not [c for c in found["checks"] if c["differ"] or c["why"]]
    # Answers of one way are no answers of the other.
    mixed = subprocess.run(
        [*command(place, "fast"), "--exact"], env=env(place), capture_output=True, text=True
    )
    assert mixed.returncode == 2 and "never mixed" in mixed.stderr
    same = command(place, "fast", "--option", f"at_once={at_once}")
    again = subprocess.run(same, env=env(place), capture_output=True, text=True, check=True)
    assert json.loads(again.stdout)["asked_now"] is False


def test_a_text_ends_with_its_time_and_keeps_what_there_is(tmp_path: Path) -> None:
    """16,384 tokens and more may be asked for; no text holds the others up."""
    long = write_tiny_model(tmp_path / "long", context=32768)
    asked = [
        Request("generate_until", ("amber birch", {"until": ["never said"], "max_gen_toks": 20000})),
        Request("generate_until", ("cedar", {"until": [], "max_gen_toks": 4})),
    ]
    for more in ({}, {"generation": "static"}):
        model = fast(long, sample_seconds=0.7, **more)
        cut, whole = model.respond(asked)
        assert isinstance(cut, dict) and "0.7 s were over after" in str(cut["partial"])
        # While the thread may still be at what was cut: nobody else may use the model meanwhile.
        start = str(
            model.respond_exactly(
                [Request("generate_until", ("amber birch", {"until": [], "max_gen_toks": 8}))]
            )[0]
        )
        assert str(cut["text"]).startswith(start[:-1]) and len(str(cut["text"])) > len(start)
        if not more:  # a static batch ends as a whole
            assert isinstance(whole, str)
            assert model.respond(asked[1:]) == [whole]
        model.close()


def test_long_texts_that_are_drawn_flow_too_and_may_wait_for_others(folder: Path) -> None:
    model = fast(folder)
    greedy = Request("generate_until", ("amber", {"until": [], "max_gen_toks": 6}))
    drawn = Request(
        "generate_until", ("amber", {"until": [" "], "max_gen_toks": 1100, "temperature": 0.7, "top_k": 1})
    )
    long = write_tiny_model(folder.parent / "longer", context=2048)
    model.close()
    model = fast(long)
    wanted = model.respond([greedy])[0]
    found = model.respond([greedy, drawn, drawn, greedy])
    assert found[0] == found[3] == wanted
    # Of one candidate the draw is the greedy one.
    as_greedy = Request("generate_until", ("amber", {"until": [" "], "max_gen_toks": 1100}))
    assert found[1] == found[2] == model.respond([as_greedy])[0]
    assert model._texts._static_only is False
    model.close()
