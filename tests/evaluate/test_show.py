"""Samples to read, lm_eval's results file, many models in one table, and what the command line says to every task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.fake_reports import fake_report
from unbroken.cli.eval import app
from unbroken.cli.eval.asked import suite_of
from unbroken.errors import InputError, UsageError
from unbroken.evaluate.contracts import Task
from unbroken.evaluate.show import as_lm_eval, many
from unbroken.evaluate.suite.reader import parse_suite

FAKE = "unbroken.testing.fake_models:FakeBackend"


def invoke(*args: object) -> str:
    found = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of eight sums, asked of two models."""
    place = tmp_path_factory.mktemp("show")
    task = place / "sums"
    task.mkdir()
    rows = [{"q": f"{i} + {i} =", "answer": str(2 * i)} for i in range(8)]
    (task / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (task / "infer.py").write_text("def prompt(row):\n    return row['q']\n")
    (task / "score.py").write_text(
        "def score(row, output):\n    return {'right': output.strip() == row['answer'], 'length': len(output)}\n"
    )
    (place / "suite.toml").write_text('[suite]\nname = "s"\n[[task]]\nname = "sums"\nharness = "plain"\n')
    for name, skill in (("good", 1.0), ("bad", 0.0)):
        invoke("run", place / "suite.toml", "-m", name, "--backend", FAKE, "--option", f"skill={skill}", "--limit", "0.5",
               "--workers", 1, "-o", place / name, "--priors", "none", "-q")  # fmt: skip
    return place


def test_samples_are_shown_with_prompt_answer_target_and_scores(done: Path) -> None:
    lines = [json.loads(line) for line in invoke("samples", done / "good", "--json").splitlines()]
    assert len(lines) == 4, "half of them"
    assert lines[3] == {
        "task": "sums", "sample": 3, "prompts": ["3 + 3 ="], "answers": [" 6"], "target": {"q": "3 + 3 =", "answer": "6"},
        "scores": {"right": 1.0, "length": 2.0},
    }  # fmt: skip
    text = invoke("samples", done / "bad", "--below", 1, "--first", 2)
    assert text.count("== sums") == 2 and "-- prompt\n0 + 0 =" in text and "right 0" in text
    assert invoke("samples", done / "good", "--below", 1) == ""


def test_samples_that_were_answered_otherwise_in_the_harness_s_own_batches_are_shown_with_both(
    done: Path,
) -> None:
    out = done / "good"
    assert invoke("samples", out, "--differ") == ""
    before = (out / "report.json").read_text()
    (answers,) = (out / "landed").glob("*/sums.jsonl")
    try:
        report = json.loads(before)
        report["checks"] = [{"task": "sums", "samples": 2, "differ": [2]}]
        (out / "report.json").write_text(json.dumps(report))
        lines = answers.read_text().splitlines()
        lines[2] = lines[2].replace('" 4"', '" 5"')
        answers.with_name("sums--exact.jsonl").write_text("\n".join(lines) + "\n")
        (line,) = invoke("samples", out, "--differ", "--json").splitlines()
        assert json.loads(line)["answers"] == [" 4"] and json.loads(line)["exactly"] == [" 5"]
        assert "-- answer\n 4\n-- in the harness's own batches\n 5" in invoke("samples", out, "--differ")
    finally:
        (out / "report.json").write_text(before)


def test_many_models_stand_in_one_table(done: Path) -> None:
    text = invoke("table", done / "good", done / "bad")
    assert text.splitlines()[0].split() == ["task", "metric", "good", "bad"]
    assert "1.0000" in text and "0.0000" in text and "length" not in text
    assert "length" in invoke("table", done / "good", "--all")
    assert json.loads(invoke("table", done / "bad", "--json"))["models"]["bad"]["sums"]["right"] == 0.0
    two = [fake_report(tasks=3), fake_report(tasks=3)]
    assert many(two).splitlines()[0].count("(") == 2, "two of one name are told apart"


def test_the_results_file_is_lm_evals(done: Path) -> None:
    found = json.loads((done / "good" / "lm_eval.json").read_text())
    assert found["results"]["sums"]["right"] == 1.0 and found["results"]["sums"]["alias"] == "sums"
    assert found["n-samples"]["sums"] == {"original": 4, "effective": 4} and found["model_name"] == "good"
    report = fake_report(tasks=3)
    recipe = {
        "limit": 0.1,
        "options": {"gen_kwargs": {"temperature": 0}},
        "n_shot": 3,
        "config": {"task": "a"},
    }
    body = as_lm_eval(report, {}, {"a": recipe, "b": {**recipe, "limit": 0.1}})
    assert body["config"]["limit"] == 0.1 and body["config"]["gen_kwargs"] == {"temperature": 0}
    assert body["n-shot"]["a"] == 3 and body["configs"]["a"] == {"task": "a"}
    assert as_lm_eval(report, {}, {"a": recipe, "b": {**recipe, "limit": 5}})["config"]["limit"] is None
    for s in report.scores:
        for m in s.metrics:
            metric, comma, name = m.name.partition(",")
            assert body["results"][s.task][m.name] == m.value
            assert body["results"][s.task][f"{metric}_stderr{comma}{name}"] in (m.stderr, "N/A")


def test_limits_are_numbers_or_shares() -> None:
    assert (
        Task("t").limited(7) == 7
        and Task("t", limit=3).limited(7) == 3
        and Task("t", limit=9).limited(7) == 7
    )
    assert Task("t", limit=0.5).limited(7) == 4 and Task("t", limit=0.001).limited(7) == 1
    suite = parse_suite('[[task]]\nname = "a"\nlimit = 0.25\n[[task]]\nname = "b"\nlimit = 3\n')
    assert [t.limit for t in suite.tasks] == [0.25, 3] and isinstance(suite.tasks[1].limit, int)
    for wrong in ("0", "-1", "1.5"):
        with pytest.raises(InputError, match="limit"):
            parse_suite(f'[[task]]\nname = "a"\nlimit = {wrong}\n')
        with pytest.raises(UsageError, match="--limit"):
            suite_of("lm_eval:a", "", float(wrong))


def test_shots_and_generation_settings_of_every_task() -> None:
    (a,) = suite_of("lm_eval:a", "", None, 5, ["temperature=0.7", 'until=["."]']).tasks
    assert a.shots == 5 and a.options["gen_kwargs"] == {"temperature": 0.7, "until": ["."]}
    (b,) = suite_of("plain:b", "", None, None, ["max_tokens=9"]).tasks
    assert b.options == {"max_tokens": 9}
    with pytest.raises(UsageError, match="--gen top_p: task 'b' of the plain harness"):
        suite_of("plain:b", "", None, None, ["top_p=0.9"])
    with pytest.raises(UsageError, match="--gen x"):
        suite_of("plain:b", "", None, None, ["x"])
    (c,) = suite_of("lm_eval:a", "", None, None, ["temperature=0.7"], 4).tasks
    assert c.options == {"samples": 4, "gen_kwargs": {"do_sample": True, "temperature": 0.7}}
    (d,) = suite_of("plain:b", "", None, None, ["temperature=0.7"], 4).tasks
    assert d.options == {"samples": 4, "temperature": 0.7}
    with pytest.raises(UsageError, match="--samples 4: the other"):
        suite_of("other:b", "", None, None, [], 4)
