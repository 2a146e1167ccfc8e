"""Fast answers against the harness's own: what counts as another answer, and what as more than chance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.errors import UsageError
from unbroken.evaluate.contracts import (
    Answer,
    Metric,
    ModelSpec,
    PreparedTask,
    Request,
    Score,
    Suite,
    Task,
)
from unbroken.evaluate.result.folder import EvalDir
from unbroken.evaluate.result.sameness import SUFFIX, Compared, check_of, checks, chosen, compare_answers
from unbroken.evaluate.run.job import Job
from unbroken.evaluate.suite.staged import apart, read_block, read_hashes, read_some_hashes, write_samples


def prepared(tmp_path: Path, requests: list[list[Request]], block: int = 4) -> PreparedTask:
    staged = write_samples(tmp_path / "t", requests, block=block)
    return PreparedTask(
        Task("t"), "1", len(requests), block, str(tmp_path / "t"), staged.prompt_hash, staged.weights
    )


def choices(n: int) -> list[list[Request]]:
    return [[Request("loglikelihood", (f"q{i}", c)) for c in "ab"] for i in range(n)]


def texts(n: int, **settings: object) -> list[list[Request]]:
    return [[Request("generate_until", (f"q{i}", {"until": ["\n"], **settings}))] for i in range(n)]


@pytest.mark.parametrize(("n", "asked"), [(1, 1), (3, 3), (10, 4), (64, 8), (200, 16), (14042, 16)])
def test_so_many_are_asked_both_ways_spread_over_the_task(n: int, asked: int) -> None:
    ids = chosen(n)
    assert len(set(ids)) == asked and ids == sorted(ids) and ids[0] >= 0 and ids[-1] < n
    assert n < 8 or ids[-1] >= n * 3 // 4


def test_the_check_asks_the_same_prompts_in_one_block(tmp_path: Path) -> None:
    whole = prepared(tmp_path, choices(100))
    check = check_of(whole)
    assert check.exact and check.blocks == 1 and check.task.name == "t" + SUFFIX
    hashes = read_hashes(Path(whole.folder))
    assert [s.prompt_hash for s in read_block(check, 0)] == [hashes[i] for i in chosen(100)]


def test_what_counts_as_another_answer(tmp_path: Path) -> None:
    p = prepared(tmp_path, choices(5))

    def answer(i: int, *outputs: list[object]) -> Answer:
        return Answer(i, "", tuple(outputs))

    fast = {
        0: answer(0, [-1.0, False], [-2.0, False]),
        1: answer(1, [-1.0, False], [-1.0001, False]),
        2: answer(2, [-1.0, True], [-2.0, False]),
        3: answer(3, [-1.0, False], [-3.0, False]),
        4: Answer(4, "", (), "no answer"),
    }
    exact = {
        0: answer(0, [-1.00001, False], [-2.0, False]),  # rounding
        1: answer(1, [-1.0001, False], [-1.0, False]),  # the other choice
        2: answer(2, [-1.0, False], [-2.0, False]),  # no longer the greedy one
        3: answer(3, [-1.0, False], [-3.5, False]),  # another number
        4: answer(4, [-1.0, False], [-3.5, False]),
    }
    found = compare_answers(p, fast, exact)
    assert (
        found.ids == (0, 1, 2, 3) and found.differ == (1, 2, 3) and found.largest == pytest.approx(0.5 / 3.5)
    )


def test_texts_differ_by_a_letter_and_drawn_ones_are_told_apart(tmp_path: Path) -> None:
    p = prepared(tmp_path, texts(2))
    a = {i: Answer(i, "", ("x y",)) for i in range(2)}
    assert compare_answers(p, a, {**a, 1: Answer(1, "", ("x z",))}).differ == (1,)
    assert not compare_answers(p, a, a).drawn
    assert compare_answers(prepared(tmp_path / "drawn", texts(2, temperature=0.7)), a, a).drawn


def score(task: str, values: list[float]) -> Score:
    mean = sum(values) / len(values)
    return Score(task, (Metric("acc", mean, 0.01),), len(values), len(values), per_sample=tuple(values))


def test_more_than_chance(tmp_path: Path) -> None:
    ids = tuple(range(0, 160, 10))
    right = [float(i % 2) for i in range(160)]
    wrong = [0.0 if i in ids else v for i, v in enumerate(right)]
    better = [1.0 if i in ids else v for i, v in enumerate(right)]
    once = [v if i != 10 else 1 - v for i, v in enumerate(right)]
    compared = [
        Compared("alike", ids, (), 1e-6),
        Compared("once", ids, (10,), 0.1),
        Compared("much", ids, ids, 0.5),
    ]
    fast = {"alike": score("alike", right), "once": score("once", right), "much": score("much", wrong)}
    exact = {"once": score("once" + SUFFIX, once), "much": score("much" + SUFFIX, better)}
    alike, much, once_ = checks(compared, fast, exact, {"lost": "nobody answered"})[0:1] + tuple(
        c for c in checks(compared, fast, exact, {}) if c.task != "alike"
    )
    assert not alike.beyond_chance and alike.fast is None
    assert much.beyond_chance and much.fast == 0.0 and much.exact == 1.0
    assert not once_.beyond_chance and once_.p == 1.0
    lost = next(c for c in checks(compared, fast, exact, {"lost": "nobody answered"}) if c.task == "lost")
    assert lost.samples == 0 and lost.why == "nobody answered"


def test_a_difference_far_below_the_standard_error_is_nothing() -> None:
    ids = tuple(range(16))
    fast = {"ppl": replace(score("ppl", [-100.0] * 16), metrics=(Metric("ppl", -100.0, 3.0),))}
    exact = {"ppl": replace(score("ppl", [-100.001] * 16), metrics=(Metric("ppl", -100.001, 3.0),))}
    found = checks([Compared("ppl", ids, (3,), 0.03)], fast, exact, {})[0]
    assert found.p is not None and found.p < 0.001 and not found.beyond_chance


def test_generated_answers_have_blocks_of_their_own(tmp_path: Path) -> None:
    assert apart(prepared(tmp_path / "a", texts(10))).block == 1
    assert len(apart(prepared(tmp_path / "a", texts(10))).weights) == 10
    likely = prepared(tmp_path / "b", choices(10))
    assert apart(likely) == likely
    rows = prepared(tmp_path / "c", [[Request("plain", ({"x": i},))] for i in range(10)])
    assert apart(rows) == rows


def test_some_hashes_are_those_of_the_samples(tmp_path: Path) -> None:
    folder = Path(prepared(tmp_path, choices(50)).folder)
    assert read_some_hashes(folder, range(7, 11)) == read_hashes(folder)[7:11]
    (folder / "requests.hash").write_text("".join(f"h{i}\n" for i in range(50)))
    assert read_some_hashes(folder, range(7, 11)) == ["h7", "h8", "h9", "h10"]


def test_the_two_ways_have_keys_of_their_own_and_never_share_a_folder(tmp_path: Path) -> None:
    spec = ModelSpec("m")
    fast = replace(spec, exact=False)
    assert spec.key("c") != fast.key("c")
    folder = EvalDir(tmp_path)
    (tmp_path / "scores").mkdir()
    asked = Job(Suite("s", ()), spec, folder).question()
    assert "exact" not in asked["model"]  # as folders of earlier releases have it
    folder.claim(asked)
    assert folder.began_exact() is True
    with pytest.raises(UsageError, match="with --exact"):
        folder.claim(Job(Suite("s", ()), fast, folder).question())
