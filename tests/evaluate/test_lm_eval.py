"""Inference and scoring taken apart give the harness's own numbers, to the last bit."""

# ruff: noqa: E402  the imports need lm_eval, and the file is skipped without it

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (make install-eval)")

from tests.support.tiny_tasks import CODE, NAMES, PROGRAMS, write_tiny_tasks
from unbroken.errors import DatasetMissing, EvaluationError, InputError, UnknownKey, UnknownTask
from unbroken.evaluate.contracts import (
    Answer,
    ModelSpec,
    PreparedTask,
    Request,
    Score,
    ScoreDone,
    ScoreJob,
    Suite,
    Task,
)
from unbroken.evaluate.harness.lm_eval import LmEvalHarness, one_process
from unbroken.evaluate.harness.lm_eval.task_index import TaskIndex, quiet_lm_eval
from unbroken.evaluate.scoring.pool import Pool, PoolLimits
from unbroken.evaluate.scoring.sandbox import sandbox_kind
from unbroken.evaluate.suite import staged
from unbroken.testing.fake_models import FakeBackend, respond

BOOTSTRAP = 40
needs_sandbox = pytest.mark.skipif(
    sandbox_kind().startswith("none"), reason=f"no sandbox here: {sandbox_kind()}"
)
MODEL = ModelSpec("fake", backend="unbroken.testing.fake_models:FakeBackend", block=4)


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny tasks, with the Hugging Face cache in a folder of its own and no network."""
    folder = tmp_path_factory.mktemp("tiny")
    before = {k: os.environ.get(k) for k in ("HF_DATASETS_CACHE", "HF_HUB_OFFLINE")}
    quiet_lm_eval()
    import datasets

    kept = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("hf")
    write_tiny_tasks(folder)
    evaluator = importlib.import_module("lm_eval.evaluator")
    add_env_info = evaluator.add_env_info
    evaluator.add_env_info = lambda results: None  # half a second of `pip list` each time; no part of a score
    yield folder
    evaluator.add_env_info = add_env_info
    datasets.config.HF_DATASETS_CACHE = kept
    for k, v in before.items():
        if v is None:
            os.environ.pop(k, None)


@pytest.fixture(autouse=True)
def only_local(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the 14,000 tasks that come with lm_eval, but for the test that is about them."""
    if "own_tasks" not in request.node.name:
        monkeypatch.setattr("unbroken.evaluate.harness.lm_eval.task_index._builtin", dict)


@pytest.fixture(scope="session")
def suite(tasks: Path) -> Suite:
    options = {"include": str(tasks), "bootstrap_iters": BOOTSTRAP}
    return Suite("tiny", tuple(Task(n, options=options) for n in NAMES), folder=str(tasks))


def fake_lm() -> Any:
    """The fake as lm_eval takes it: what `lm_eval` run alone would call."""
    from lm_eval.api.model import LM

    class Fake(LM):
        def _ask(self, requests: Any) -> Any:
            out, before, again = [], None, 0
            for r in requests:
                request = Request(r.request_type, tuple(json.loads(json.dumps(r.args))))
                again = again + 1 if request == before else 0
                before = request
                out.append(respond(request, again))
            return out

        def loglikelihood(self, requests: Any) -> Any:
            return [tuple(x) for x in self._ask(requests)]

        loglikelihood_rolling = generate_until = _ask

        def apply_chat_template(self, history: Any, add_generation_prompt: bool = True) -> str:
            return render(history, add_generation_prompt)

        tokenizer_name = "fake"

    return Fake()


def render(history: Any, add_generation_prompt: bool) -> str:
    text = "".join(f"<{m['role']}>{m['content']}</>" for m in history)
    return text + ("<assistant>" if add_generation_prompt else "")


def alone(tasks: Path, name: str, **more: Any) -> dict[str, Any]:
    """`lm_eval` by itself on one task or group."""
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    with one_process():
        return lm_eval.simple_evaluate(
            fake_lm(), tasks=[name], task_manager=manager, bootstrap_iters=BOOTSTRAP, **more
        )


def answer(
    harness: LmEvalHarness, prepared: PreparedTask, shards: int, spec: ModelSpec = MODEL, backend: Any = None
) -> list[Answer]:
    """Blocks dealt to `shards` workers, each with a model of its own; answers merged by sample, through JSON."""
    models = [(backend or FakeBackend()).load(spec, Path(spec.source), ()) for _ in range(shards)]
    out: dict[int, Answer] = {}
    for block in reversed(range(prepared.blocks)):
        got = harness.run(models[block % shards], prepared, harness.build_requests(prepared, block))
        for a in got:
            assert a.sample not in out, "answered twice"
            out[a.sample] = staged.decode_answer(staged.encode_answer(a))
    assert sorted(out) == list(range(prepared.samples))
    return [out[i] for i in sorted(out)]


def same(score: Score, row: dict[str, Any]) -> None:
    """Every number of the harness's row, bit for bit."""
    expected = {k: v for k, v in row.items() if "," in k}
    got: dict[str, Any] = {}
    for m in score.metrics:
        metric, _, name = m.name.partition(",")
        got[m.name] = m.value
        got[f"{metric}_stderr,{name}"] = "N/A" if m.stderr is None else m.stderr
    assert {k: v if isinstance(v, str) else float(v).hex() for k, v in got.items()} == {
        k: v if isinstance(v, str) else float(v).hex() for k, v in expected.items()
    }


def prepare(
    suite: Suite, name: str, folder: Path, **changes: Any
) -> tuple[LmEvalHarness, list[PreparedTask]]:
    harness = LmEvalHarness()
    task = replace(next(t for t in suite.tasks if t.name == name), **changes)
    leaves = harness.expand(task, suite)
    return harness, [harness.prepare(t, suite, MODEL, None, folder / t.name) for t in leaves]


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_harness_own_for_any_number_of_shards(
    suite: Suite, tasks: Path, tmp_path: Path, name: str
) -> None:
    reference = alone(tasks, name)
    harness, prepared = prepare(suite, name, tmp_path)
    answered = [answer(harness, p, 1) for p in prepared]
    for shards in (2, 3, 7):
        assert [answer(harness, p, shards) for p in prepared] == answered
    scores = [harness.score(p, a) for p, a in zip(prepared, answered, strict=True)]
    for p, s in zip(prepared, scores, strict=True):
        same(s, reference["results"][p.task.harness_name])
        assert s.scored == s.samples == reference["n-samples"][p.task.harness_name]["effective"]
        assert not s.notes
    group = harness.combine(name, prepared, scores)
    if name == "tiny_group":
        assert group is not None
        same(group, reference["groups"][name])
    else:
        assert group is None


@pytest.mark.parametrize("shots", [0, 4])
def test_few_shot_examples_are_those_of_the_whole_task(
    suite: Suite, tasks: Path, tmp_path: Path, shots: int
) -> None:
    reference = alone(tasks, "tiny_choice", num_fewshot=shots, limit=9)
    harness, (prepared,) = prepare(suite, "tiny_choice", tmp_path, shots=shots, limit=9)
    assert (prepared.samples, prepared.whole) == (9, 23), "a later plan knows how many there are"
    sent = [r.arguments[0] for s in staged.iter_samples(Path(prepared.folder)) for r in s.requests]
    logged = [a[0] for row in reference["samples"]["tiny_choice"] for a in row["arguments"]]
    assert prepared.samples == 9
    assert sent == logged
    same(harness.score(prepared, answer(harness, prepared, 3)), reference["results"]["tiny_choice"])


def test_chat_templates_are_applied_once_and_not_needed_for_scoring(
    suite: Suite, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unbroken.evaluate.harness.lm_eval.chat_of", lambda spec, files: render)
    reference = alone(tasks, "tiny_sums", apply_chat_template=True, system_instruction="Be brief.")
    harness = LmEvalHarness()
    options = {"include": str(tasks), "bootstrap_iters": BOOTSTRAP, "system_instruction": "Be brief."}
    spec = replace(MODEL, chat_template=True)
    prepared = harness.prepare(Task("tiny_sums", options=options), suite, spec, None, tmp_path)
    first = next(iter(staged.iter_samples(tmp_path))).requests[0].arguments[0]
    assert first.startswith("<system>Be brief.</><user>")
    assert first.endswith("=</><assistant>")
    monkeypatch.undo()
    same(harness.score(prepared, answer(harness, prepared, 2)), reference["results"]["tiny_sums"])


def test_per_sample_values_average_to_the_headline(suite: Suite, tmp_path: Path) -> None:
    harness, (prepared,) = prepare(suite, "tiny_choice", tmp_path)
    score = harness.score(prepared, answer(harness, prepared, 1))
    assert len(score.per_sample) == score.samples
    assert sum(v for v in score.per_sample if v is not None) / score.samples == score.metrics[0].value


def test_a_metric_that_is_no_mean_has_no_per_sample_values(suite: Suite, tmp_path: Path) -> None:
    harness, (prepared,) = prepare(suite, "tiny_cloze", tmp_path)
    assert harness.score(prepared, answer(harness, prepared, 1)).per_sample == ()


def test_a_scorer_that_crashes_on_one_sample_costs_that_sample(
    suite: Suite, tasks: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tasks"
    write_tiny_tasks(folder)
    helpers = folder / "tiny_helpers.py"
    helpers.write_text(
        helpers.read_text().replace(
            'return {\n        "right"', 'assert doc["question"][0] != "8"\n    return {\n        "right"'
        )
    )
    whole = Suite("s", (Task("tiny_several", options={"include": str(folder), "bootstrap_iters": 10}),))
    harness, (prepared,) = prepare(whole, "tiny_several", tmp_path)
    questions = [s.requests[0].arguments[0] for s in staged.iter_samples(Path(prepared.folder))]
    bad = [i for i, q in enumerate(questions) if q.startswith("8")]
    assert 0 < len(bad) < len(questions)
    score = harness.score(prepared, answer(harness, prepared, 1))
    assert [n.sample for n in score.notes] == bad
    assert {n.status for n in score.notes} == {"crashed"}
    assert "AssertionError" in score.notes[0].why
    assert score.scored == len(questions) - len(bad)
    # The rest is scored as the harness scores it: the mean over those documents alone.
    harness, (mended,) = prepare(suite, "tiny_several", tmp_path / "good")
    good = harness.score(mended, answer(harness, mended, 1))
    kept = [v for i, v in enumerate(good.per_sample) if i not in bad]
    assert score.metrics[0].value == sum(v for v in kept if v is not None) / len(kept)
    assert [v for i, v in enumerate(score.per_sample) if i not in bad] == kept


def test_a_judge_that_gives_no_verdict_leaves_its_sample_unscored(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    write_tiny_tasks(folder)
    helpers = folder / "tiny_helpers.py"
    helpers.write_text(
        helpers.read_text().replace(
            'digits = "".join',
            'from unbroken.evaluate.scoring.judge import Unscored\n    if doc["question"][0] == "8":\n'
            '        raise Unscored("HTTP 429")\n    digits = "".join',
        )
    )
    whole = Suite("s", (Task("tiny_several", options={"include": str(folder), "bootstrap_iters": 10}),))
    harness, (prepared,) = prepare(whole, "tiny_several", tmp_path)
    score = harness.score(prepared, answer(harness, prepared, 1))
    assert {(n.status, n.why) for n in score.notes} == {("unscored", "HTTP 429")}
    assert score.scored == score.samples - len(score.notes)


def test_a_sample_without_an_answer_is_not_counted_as_wrong(suite: Suite, tmp_path: Path) -> None:
    harness, (prepared,) = prepare(suite, "tiny_sums", tmp_path)
    answers = answer(harness, prepared, 1)
    whole = harness.score(prepared, answers)
    answers[5] = replace(answers[5], outputs=(), problem="the endpoint refused it 5 times: HTTP 503")
    answers[6] = replace(answers[6], outputs=(), problem="crashed: took the scorer down (signal 9)")
    score = harness.score(prepared, answers)
    assert [(n.sample, n.status) for n in score.notes] == [(5, "unanswered"), (6, "crashed")]
    assert score.scored == score.samples - 2
    kept = [v for i, v in enumerate(whole.per_sample) if i not in (5, 6)]
    assert score.metrics[0].value == sum(v for v in kept if v is not None) / len(kept)


def test_answers_to_other_prompts_are_refused(suite: Suite, tmp_path: Path) -> None:
    harness, (prepared,) = prepare(suite, "tiny_sums", tmp_path)
    answers = answer(harness, prepared, 1)
    swapped = list(answers)
    swapped[2], swapped[5] = replace(answers[5], sample=2), replace(answers[2], sample=5)
    with pytest.raises(EvaluationError, match="sample 2 was answered for another prompt"):
        harness.score(prepared, swapped)
    with pytest.raises(EvaluationError, match="23 documents now, but 22"):
        harness.score(prepared, answers[:-1])


def test_the_version_follows_the_task_not_its_place(suite: Suite, tmp_path: Path) -> None:
    moved, changed = tmp_path / "moved", tmp_path / "changed"
    write_tiny_tasks(moved)
    write_tiny_tasks(changed)
    yaml = changed / "tiny_sums.yaml"
    yaml.write_text(yaml.read_text().replace("ignore_case: true", "ignore_case: false"))
    versions = []
    for i, folder in enumerate((Path(suite.folder), moved, changed)):
        other = Suite("s", (Task("tiny_sums", options={"include": str(folder)}),))
        versions.append(prepare(other, "tiny_sums", tmp_path / str(i))[1][0].version)
    assert versions[0] == versions[1] != versions[2]
    assert versions[0].startswith("lm_eval 0.4")


def test_an_unknown_task_names_the_nearest(suite: Suite) -> None:
    with pytest.raises(UnknownTask, match="tiny_sums"):
        LmEvalHarness().expand(replace(suite.tasks[0], name="tiny_sum", target="tiny_sum"), suite)


def test_an_unknown_option_names_the_nearest(suite: Suite) -> None:
    with pytest.raises(UnknownKey, match="bootstrap_iters"):
        LmEvalHarness().expand(Task("x", options={"bootstrap_iter": 5}), suite)


def test_a_dataset_that_is_not_there_is_said_before_a_gpu_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    write_tiny_tasks(folder)
    (folder / "sums_test.jsonl").unlink()
    suite = Suite("s", (Task("tiny_sums", options={"include": str(folder)}),))
    with pytest.raises(DatasetMissing, match="tiny_sums") as e:
        prepare(suite, "tiny_sums", tmp_path)
    assert e.value.hint is not None
    assert "eval stage" in e.value.hint


def test_a_broken_template_is_an_input_error(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    write_tiny_tasks(folder)
    yaml = folder / "tiny_sums.yaml"
    yaml.write_text(yaml.read_text().replace('"{{question}}"', '"{{question.nothing.at_all}}"'))
    suite = Suite("s", (Task("tiny_sums", options={"include": str(folder)}),))
    with pytest.raises(InputError, match="tiny_sums"):
        prepare(suite, "tiny_sums", tmp_path)


def test_preparing_again_ends_the_same(suite: Suite, tmp_path: Path) -> None:
    one = prepare(suite, "tiny_vote", tmp_path)[1][0]
    two = prepare(suite, "tiny_vote", tmp_path)[1][0]
    assert one == two
    assert one.requests_per_sample == 5
    assert one.samples == 23
    assert one.blocks == 6


def test_group_overrides_reach_the_leaves(tasks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    write_tiny_tasks(folder)
    (folder / "outer.yaml").write_text(
        "group: outer\nnum_fewshot: 1\ntask:\n  - tiny_group\n  - task: tiny_cloze\n    doc_to_target: ' {{last}}!'\n"
        "  - group: inner\n    task: [tiny_inputs]\n"
        "aggregate_metric_list:\n  - metric: acc\nmetadata:\n  version: 1\n"
    )
    index = TaskIndex([folder])
    loaded = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False).load("outer")
    leaves = index.leaves("outer")
    assert [leaf.name for leaf in leaves] == list(loaded["tasks"])
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    for leaf in leaves:
        got = manager.load([leaf.spec])["tasks"][leaf.name]
        assert got.dump_config() == loaded["tasks"][leaf.name].dump_config()
    assert loaded["tasks"]["tiny_red"].config.num_fewshot == 1


def test_nested_groups_aggregate_as_the_harness_does(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    write_tiny_tasks(folder)
    (folder / "outer.yaml").write_text(
        "group: outer\ntask: [tiny_group, tiny_inputs]\naggregate_metric_list:\n"
        "  - metric: acc\n    weight_by_size: true\nmetadata:\n  version: 1\n"
    )
    suite = Suite("s", (Task("outer", options={"include": str(folder), "bootstrap_iters": 10}),))
    reference = alone(folder, "outer")
    harness, prepared = prepare(suite, "outer", tmp_path / "p")
    assert [p.task.name for p in prepared] == ["outer.tiny_red", "outer.tiny_blue", "outer.tiny_inputs"]
    assert {p.task.group for p in prepared} == {"outer"}
    scores = [harness.score(p, answer(harness, p, 2)) for p in prepared]
    group = harness.combine("outer", prepared, scores)
    assert group is not None
    same(replace(group, metrics=group.metrics[:1]), reference["groups"]["outer"])
    inner = [replace(m, name=m.name.removeprefix("tiny_group: ")) for m in group.metrics if ": " in m.name]
    same(replace(group, metrics=tuple(inner)), reference["groups"]["tiny_group"])


def code_job(folder: Path, monkeypatch: pytest.MonkeyPatch, programs: tuple[str, ...]) -> ScoreJob:
    monkeypatch.setattr("tests.support.tiny_tasks.PROGRAMS", programs)
    monkeypatch.setenv("UNBROKEN_TEST_SECRET", "hidden")
    write_tiny_tasks(folder / "tasks")
    suite = Suite("s", (Task(CODE, options={"include": str(folder / "tasks"), "bootstrap_iters": 10}),))
    harness, (prepared,) = prepare(suite, CODE, folder)
    assert prepared.task.metric == "code", "the harness marks it unsafe, whatever the suite says"
    answers = answer(harness, prepared, 1)
    with pytest.raises(EvaluationError, match="not in the sandbox"):
        harness.score(prepared, answers)
    (folder / "answers.jsonl").write_text("".join(staged.encode_answer(a) + "\n" for a in answers))
    return ScoreJob(prepared, str(folder / "answers.jsonl"), str(folder / "score.json"), "c0ffee")


def pool_score(job: ScoreJob, **limits: Any) -> ScoreDone:
    pool = Pool(1, PoolLimits(**limits))
    try:
        pool.submit(job)
        deadline = time.monotonic() + 250
        while not (done := pool.collect()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return done[0]
    finally:
        pool.close()


@pytest.mark.slow
@needs_sandbox
def test_generated_code_is_scored_in_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = pool_score(code_job(tmp_path, monkeypatch, PROGRAMS))
    assert done.score is not None, done.error
    assert done.score.per_sample == (1.0, 0.0, 0.0, 0.0, 0.0)
    assert not Path("/etc/unbroken-was-here").exists()
    assert json.loads((tmp_path / "score.json").read_text())["scored"] == 5


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs_sandbox
def test_a_program_that_takes_the_scorer_down_costs_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = ("passed = True", "import os; os.kill(os.getpid(), 9)", "passed = True", "while True: pass")
    job = code_job(tmp_path, monkeypatch, hostile)
    done = pool_score(job, sample_s=2.0, start_s=60.0)
    assert done.score is not None, done.error
    assert [(n.sample, n.status) for n in done.score.notes] == [(1, "crashed"), (3, "crashed")]
    assert done.score.metrics[0].value == 1.0


def test_git_says_nothing_where_there_is_no_repository(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    harness, [prepared] = prepare(suite, "tiny_choice", tmp_path)
    harness.score(prepared, answer(harness, prepared, 1))
    assert "fatal" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["tiny_choice", "tiny_cloze", "tiny_mutual"])
def test_bootstrapped_errors_are_the_same_with_the_harness_own_processes(
    tasks: Path, tmp_path: Path, name: str
) -> None:
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    reference = lm_eval.simple_evaluate(fake_lm(), tasks=[name], task_manager=manager, bootstrap_iters=2000)
    whole = Suite("s", (Task(name, options={"include": str(tasks), "bootstrap_iters": 2000}),))
    harness, (prepared,) = prepare(whole, name, tmp_path)
    same(harness.score(prepared, answer(harness, prepared, 3)), reference["results"][name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_harness_own_tasks_are_found_by_name_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    index = TaskIndex()
    assert len(index.names()) > 5000
    leaves = index.leaves("mmlu")
    assert len(leaves) == 57
    with pytest.raises(UnknownTask, match="hellaswag"):
        index.find("helaswag")
    assert [g.name for g in index.groups("mmlu")][-1] == "mmlu"
    started = time.process_time()
    again = TaskIndex()
    assert again.leaves("mmlu") == leaves
    assert time.process_time() - started < 2.0


@pytest.mark.slow
def test_every_file_that_a_task_is_made_of_is_stamped(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data outside the folders with tasks, a YAML's own include, its functions, folders that are named by a list."""
    from unbroken.evaluate.preparation import prepare, reads
    from unbroken.evaluate.result.folder import EvalDir

    suite_folder, away = tmp_path / "suite", tmp_path / "away"
    # A preparing process has no modules of tests, which ask for much more than files.
    blind = reads.is_blind
    monkeypatch.setattr(reads, "is_blind", lambda p: p.startswith(str(tmp_path)) and blind(p))
    (suite_folder / "mine").mkdir(parents=True)
    away.mkdir()
    rows = [{"q": f"{i} + 1 =", "a": str(i + 1)} for i in range(5)]
    (away / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (suite_folder / "base.yaml").write_text(
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {away}/rows.jsonl\n"
        "test_split: test\noutput_type: generate_until\nmetric_list:\n  - metric: exact_match\n"
        'doc_to_target: "{{a}}"\ngeneration_kwargs: {until: ["."]}\n'
    )
    (suite_folder / "mine" / "utils.py").write_text("def text(doc):\n    return 'Q: ' + doc['q']\n")
    (suite_folder / "mine" / "stamped.yaml").write_text(
        "include: ../base.yaml\ntask: stamped\ndoc_to_text: !function utils.text\n"
    )
    task = Task("stamped", options={"include": ["mine"], "bootstrap_iters": BOOTSTRAP})
    suite = Suite("s", (task,), folder=str(suite_folder))
    folder = EvalDir(tmp_path / "out")

    def prepare_now() -> PreparedTask:
        value = prepare._prepare(LmEvalHarness(), task, suite, MODEL, None, folder.task("stamped"))
        found: PreparedTask = prepare.decode(PreparedTask, value["prepared"])
        prepare.remember(folder, found, mark(), value["reads"])
        return found

    def mark() -> str:
        return prepare.fingerprint(task, suite, MODEL, None, folder.shared)

    before, times = prepare_now(), iter(range(1, 100))
    assert prepare.read_prepared(folder, task, mark()) == before
    for file, old, new, same_prompts in (
        (away / "rows.jsonl", '"1"', '"9"', True),
        (away / "rows.jsonl", "0 + 1", "9 + 9", False),
        (suite_folder / "base.yaml", '["."]', '["!"]', False),
        (suite_folder / "base.yaml", "{{a}}", "{{q}}", True),
        (suite_folder / "mine" / "utils.py", "Q: ", "q: ", False),
        (
            suite_folder / "mine" / "stamped.yaml",
            "task: stamped",
            "task: stamped\nfewshot_delimiter: x",
            True,
        ),
    ):
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        stamp = next(times)
        os.utime(file, ns=(stamp, stamp))  # `datasets` tells files apart by this alone
        assert prepare.read_prepared(folder, task, mark()) is None, (file, old)
        after = prepare_now()
        assert (after.prompt_hash == before.prompt_hash) == same_prompts, (file, old)
        assert (after.inputs, after.asks) != (before.inputs, "") and after.asks == before.asks
        before = after


@pytest.mark.parametrize("empty", ["no rows", "all filtered out"])
def test_a_task_without_documents_is_told_so(tasks: Path, tmp_path: Path, empty: str) -> None:
    rows = "" if empty == "no rows" else '{"q": "1", "a": "2"}\n'
    (tmp_path / "d.jsonl").write_text(rows)
    (tmp_path / "utils.py").write_text("def none(docs):\n    return docs.filter(lambda d: False)\n")
    (tmp_path / "nothing.yaml").write_text(
        f"task: nothing\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/d.jsonl\n"
        "test_split: test\noutput_type: generate_until\nmetric_list:\n  - metric: exact_match\n"
        'doc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\nprocess_docs: !function utils.none\n'
    )
    task = Task("nothing", options={"include": str(tmp_path)})
    with pytest.raises(InputError, match="no documents"):
        LmEvalHarness().prepare(task, Suite("s", (task,)), MODEL, None, tmp_path / "out")


def test_a_disk_that_is_full_while_data_are_prepared_is_told_as_one() -> None:
    from unbroken.evaluate.preparation.prepare import disk_full

    full = OSError(28, "No space left on device", "/cache/some.arrow")
    wrapped = RuntimeError("An error occurred while generating the dataset")
    wrapped.__cause__ = full
    for error in (full, wrapped):
        said = disk_full(error)
        assert said is not None and "No space left" in str(said) and "/cache/some.arrow" in str(said)
    assert disk_full(RuntimeError("x")) is None and disk_full(OSError(2, "no such file")) is None
