"""Several answers to each prompt: what is asked, and the mean, pass@k and majority of their scores."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.errors import InputError
from unbroken.evaluate.contracts import Answer, Metric, ModelSpec, Request, SampleNote, Score, Suite, Task
from unbroken.evaluate.harness import repeated
from unbroken.evaluate.harness.plain import PlainHarness
from unbroken.evaluate.harness.plain.score import score_all
from unbroken.evaluate.suite.staged import iter_samples

DRAWN = {"until": [], "max_gen_toks": 4, "do_sample": True, "temperature": 0.8}


def test_only_drawn_texts_are_asked_often() -> None:
    text, choice = Request("generate_until", ("a", DRAWN)), Request("loglikelihood", ("a", "b"))
    assert repeated.count_of([[text], [text]], 4, "t") == 4
    assert repeated.count_of([[text, choice]], 4, "t") == 1, "a choice is the same each time"
    greedy = Request("generate_until", ("a", {**DRAWN, "do_sample": False}))
    assert repeated.count_of([[greedy]], 1, "t") == 1
    with pytest.raises(InputError, match="4 answers to each prompt of task 't' would all be the same"):
        repeated.count_of([[text], [greedy]], 4, "t")
    other = Request("generate_until", ("b", DRAWN))
    assert repeated.repeat([text, other], 3) == (text,) * 3 + (other,) * 3


def test_mean_pass_at_k_and_majority() -> None:
    found = repeated.summarize([1, 0, 0, 1, 0], ["7", "8", "8", "7", "9"])
    assert found[""] == 0.4
    assert found[" pass@2"] == pytest.approx(1 - 3 / 10), "of ten pairs three hold no right one"
    assert found[" pass@4"] == found[" pass@5"] == 1.0
    assert found[" majority@5"] == 1.0, "7 and 8 came twice, 7 first"
    assert set(repeated.summarize([0.5, 1.0], ["a", "b"])) == {"", " majority@2"}, (
        "no pass where a value is a share"
    )
    assert repeated.name_of("exact_match,strict", " pass@2") == "exact_match pass@2,strict"


def test_one_score_of_all_draws() -> None:
    def draw(*values: float | None, notes: tuple[SampleNote, ...] = ()) -> Score:
        metrics = (Metric("acc,none", 0.0, None), Metric("bleu,none", sum(v or 0 for v in values), 0.1))
        return Score("t", metrics, 3, 3 - len(notes), notes, values={"acc,none": values}, per_sample=values)

    bad = (SampleNote(2, "crashed", "x"),)
    scores = [draw(1, 0, 1), draw(0, 0, None, notes=bad)]
    votes: list[dict[str, list[Any]]] = [{"acc,none": ["a", "b", "c"]}, {"acc,none": ["d", "b", "c"]}]
    found = repeated.score_of(scores, votes)
    assert [m.name for m in found.metrics] == [
        "acc,none",
        "acc pass@2,none",
        "acc majority@2,none",
        "bleu,none",
    ]
    by_name = {m.name: m for m in found.metrics}
    assert by_name["acc,none"].value == 0.25 and by_name["acc,none"].stderr == pytest.approx(0.25)
    assert by_name["acc pass@2,none"].value == 0.5 and by_name["acc majority@2,none"].value == 0.5
    assert by_name["bleu,none"].value == 1.0 and by_name["bleu,none"].stderr is None
    assert found.values["acc,none"] == (0.5, 0.0, None) == found.per_sample
    assert found.scored == 2 and found.notes == bad


def test_a_plain_task_is_asked_often_and_scored_each_time(tmp_path: Path) -> None:
    task = tmp_path / "sums"
    task.mkdir()
    (task / "data.jsonl").write_text('{"q": "1+1", "a": 2}\n{"q": "2+2", "a": 4}\n')
    (task / "infer.py").write_text("def prompt(row): return row['q']\n")
    (task / "score.py").write_text(
        "def score(row, output): return int(output) == row['a']\ndef vote(row, output): return int(output)\n"
    )
    asked = Task("sums", "plain", options={"samples": 3, "temperature": 0.8})
    suite, spec = Suite("s", (asked,), folder=str(tmp_path)), ModelSpec("m", "openai")
    prepared = PlainHarness().prepare(asked, suite, spec, None, tmp_path / "out")
    samples = list(iter_samples(tmp_path / "out"))
    assert [len(s.requests) for s in samples] == [3, 3]
    outputs = (("2", " 2", "3"), ("5", "4", "5 "))
    answers = [Answer(s.id, s.prompt_hash, o) for s, o in zip(samples, outputs, strict=True)]
    score = PlainHarness().score(prepared, answers)
    assert {m.name: m.value for m in score.metrics} == {
        "score": 0.5, "score pass@2": pytest.approx(5 / 6), "score pass@3": 1.0, "score majority@3": 0.5,
    }  # fmt: skip
    parts = PlainHarness().score_part(prepared, answers, range(2), 9.0)
    assert parts is not None and PlainHarness().score_of_parts(prepared, parts[0]).metrics == score.metrics
    with pytest.raises(InputError, match="would all be the same"):
        greedy = Task("sums", "plain", options={"samples": 3})
        PlainHarness().prepare(greedy, suite, spec, None, tmp_path / "other")


def test_an_aggregate_of_ones_own_sees_its_own_metrics_only() -> None:
    from unbroken.evaluate.harness.plain.score import aggregate

    values = {"right": [0.5, 1.0], "right pass@2": [1.0, 1.0]}
    own = SimpleNamespace(aggregate=lambda v: {name: max(x) for name, x in v.items()})
    assert [(m.name, m.value) for m in aggregate(own, values, True)] == [
        ("right", 1.0),
        ("right pass@2", 1.0),
    ]
    row, answer = {}, Answer(0, "h", ("a", "b"))
    module = SimpleNamespace(score=lambda row, output: None)
    assert score_all(module, [row], [answer], 2) == [SampleNote(0, "unscored", "score() gave None")]


@pytest.mark.slow
def test_lm_evals_own_scoring_sees_one_answer_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (make install-eval)")
    from tests.support.tiny_tasks import write_tiny_tasks
    from unbroken.evaluate.harness.lm_eval import LmEvalHarness

    write_tiny_tasks(tmp_path / "tasks", documents=4)
    options = {
        "include": str(tmp_path / "tasks"),
        "samples": 3,
        "gen_kwargs": {"do_sample": True, "temperature": 0.7},
    }
    asked = Task("tiny_sums", options={**options, "bootstrap_iters": 10})
    suite, spec = Suite("s", (asked,), folder=str(tmp_path)), ModelSpec("m", "transformers")
    prepared = LmEvalHarness().prepare(asked, suite, spec, None, tmp_path / "out")
    samples = list(iter_samples(tmp_path / "out"))
    assert all(
        len(s.requests) == 3 and len({json.dumps(r.arguments) for r in s.requests}) == 1 for s in samples
    )
    targets = json.loads((tmp_path / "out" / "targets.json").read_text())
    right = [
        Answer(s.id, s.prompt_hash, (f"it is {t}", f"{t}", "none"))
        for s, t in zip(samples, targets, strict=True)
    ]
    score = LmEvalHarness().score(prepared, right)
    found = {m.name: m.value for m in score.metrics}
    filters = sorted({n.partition(",")[2] for n in found})
    for name in filters:
        own = {n.partition(",")[0]: v for n, v in found.items() if n.endswith(f",{name}")}
        assert {"exact_match", "exact_match pass@2", "exact_match pass@3", "exact_match majority@3"} <= set(
            own
        )
    numbers = next(n for n in filters if found[f"exact_match,{n}"] > 0.5)
    assert found[f"exact_match,{numbers}"] == pytest.approx(2 / 3)
    assert found[f"exact_match majority@3,{numbers}"] == found[f"exact_match pass@3,{numbers}"] == 1.0
