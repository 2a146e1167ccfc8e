from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.support.fake_reports import fake_report
from unbroken.evaluate.contracts import Metric, Report, SampleNote, Score
from unbroken.evaluate.result.results import compare, comparison, differences, finite, left_out, table
from unbroken.evaluate.result.significance import p_value, paired_p


def score(task: str, values: list[float], **more: object) -> Score:
    n = len(values)
    mean = sum(values) / n
    stderr = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return Score(
        task, (Metric("acc", mean, stderr),), n, n, prompt_hash="p", per_sample=tuple(values), **more
    )  # type: ignore[arg-type]


def flips(r: random.Random, values: list[float], down: int) -> list[float]:
    out = list(values)
    for i in r.sample([i for i, v in enumerate(values) if v == 1.0], down):
        out[i] = 0.0
    return out


def test_a_fall_on_the_same_samples_is_seen_where_two_means_do_not_show_it() -> None:
    r = random.Random(0)
    before = [float(r.random() < 0.6) for _ in range(1000)]
    after = flips(r, before, 25)
    paired = compare([score("t", before)], [score("t", after)])[0]
    assert (paired.verdict, paired.paired) == ("worse", True)
    other = score("t", after)
    apart = compare([score("t", before)], [Score("t", other.metrics, 1000, 1000)])[0]
    assert (apart.verdict, apart.paired) == ("same", False)


def test_equal_models_are_flagged_as_rarely_as_promised() -> None:
    """500 comparisons of 20 tasks with nothing but chance between them, at one in a hundred."""
    r = random.Random(5)
    flagged = 0
    for _ in range(500):
        pair = [
            [Score(f"t{i}", (Metric("acc", r.gauss(0.5, 0.01), 0.01),), 100, 100) for i in range(20)]
            for _ in range(2)
        ]
        flagged += any(d.verdict in ("worse", "better") for d in compare(*pair))
    assert flagged <= 15


def test_direction_and_unknown() -> None:
    def one(v: float, **more: object) -> list[Score]:
        return [Score("t", (Metric("ppl", v, **more),), 9, 9)]  # type: ignore[arg-type]

    assert (
        compare(one(5.0, stderr=0.1, higher_is_better=False), one(9.0, stderr=0.1, higher_is_better=False))[
            0
        ].verdict
        == "worse"
    )
    assert (
        compare(one(5.0, stderr=0.1, higher_is_better=False), one(2.0, stderr=0.1, higher_is_better=False))[
            0
        ].verdict
        == "better"
    )
    assert compare(one(5.0), one(9.0))[0].verdict == "unknown"
    assert compare(one(5.0), one(5.0))[0].verdict == "same"
    assert compare(one(5.0), [Score("other", (), 0, 0)]) == []


def test_p_values() -> None:
    assert p_value(1.96, 1.0) == pytest.approx(0.05, abs=1e-3)
    assert p_value(0, 0) == 1.0
    assert p_value(1, 0) == 0.0


def test_the_table_says_what_is_missing() -> None:
    s = Score(
        "t",
        (Metric("acc,none", 0.5, 0.01),),
        10,
        8,
        (SampleNote(3, "unscored", "judge timed out"), SampleNote(4, "unanswered", "500")),
    )
    text = table(
        Report("suite", "model", "c" * 32, 0.0, 10.0, (s,), {"u": "no data"}, (), (), (), 5.0, 20.0, 0.9)
    )
    assert "0.5000 ± 0.0100" in text and "8/10" in text
    assert "1 unanswered, 1 unscored; sample 3: judge timed out" in text
    assert "u: no score: no data" in text
    assert "no GPU was taken" in text


def test_differences_as_text() -> None:
    text = differences(compare([score("t", [1.0, 0.0] * 50)], [score("t", [0.0, 0.0] * 50)]))
    assert "worse" in text and "-0.5000" in text


def mean(task: str, value: float, n: int = 100, **more: object) -> Score:
    return Score(task, (Metric("acc", value, 0.01),), n, n, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ({"prompt_hash": "p"}, {"prompt_hash": "q"}, "other prompts"),
        ({"version": "1"}, {"version": "2"}, "another task version"),
        ({"n": 100, "prompt_hash": "p"}, {"n": 1000, "prompt_hash": "q"}, "100 against 1,000 samples"),
        (
            {"prompt_hash": "p", "version": "1"},
            {"prompt_hash": "q", "version": "2"},
            "other prompts, another task version",
        ),
    ],
)
def test_what_was_asked_otherwise_gets_no_verdict(
    old: dict[str, object], new: dict[str, object], why: str
) -> None:
    (d,) = compare([mean("t", 0.9, **old)], [mean("t", 0.1, **new)])  # type: ignore[arg-type]
    assert (d.verdict, d.why, d.p) == ("not comparable", why, None)
    assert f"not comparable: {why}" in differences([d])


def test_a_group_is_not_comparable_where_a_task_in_it_has_other_prompts() -> None:
    old = [mean("mmlu_law", 0.5, prompt_hash="p"), mean("arc", 0.5, prompt_hash="a"), mean("mmlu", 0.9)]
    new = [mean("mmlu_law", 0.5, prompt_hash="q"), mean("arc", 0.5, prompt_hash="a"), mean("mmlu", 0.1)]
    assert [d.verdict for d in compare(old, new)] == ["not comparable", "same", "not comparable"]
    assert [d.verdict for d in compare(old[1:], new[1:])] == ["same", "worse"]


def test_every_metric_is_compared_and_counted_and_the_headline_comes_first() -> None:
    def one(**values: float) -> list[Score]:
        return [Score("t", tuple(Metric(n, v, 0.01) for n, v in values.items()), 100, 100)]

    old, new = one(acc=0.5, f1=0.5), one(acc=0.5, f1=0.2)
    assert [d.metric for d in compare(old, new)] == ["acc"]  # what `eval watch` flags follows the headline
    found = compare(old, new, every_metric=True)
    assert [(d.metric, d.verdict) for d in found] == [("acc", "same"), ("f1", "worse")]
    edge = one(acc=0.5, f1=0.5 - 0.01 * math.sqrt(2) * 2.7)  # p = 0.007: one comparison flags it, two do not
    assert compare(one(f1=0.5), one(f1=edge[0].metrics[1].value))[0].verdict == "worse"
    assert [d.verdict for d in compare(old, edge, every_metric=True)] == ["same", "same"]
    text = differences(found)
    assert text.count("\nt ") == 1 and "f1" in text, "a task is named once"


def test_only_the_headline_is_paired_and_only_with_itself() -> None:
    old, new = score("t", [1.0, 0.0] * 50), score("t", [1.0, 0.0] * 50)
    f1 = Metric("f1", 0.5, 0.05)
    two = [replace(s, metrics=(*s.metrics, f1)) for s in (old, new)]
    assert [d.paired for d in compare(two[:1], two[1:], every_metric=True)] == [True, False]
    turned = replace(new, metrics=(f1, *new.metrics))
    assert not any(d.paired for d in compare(two[:1], [turned], every_metric=True))


def test_what_only_one_side_has_is_named() -> None:
    old = [mean("t", 0.5), mean("gone", 0.5)]
    new = [Score("t", (Metric("acc", 0.5, 0.01), Metric("f1", 0.5)), 100, 100)]
    assert left_out(old, new) == ["only before: gone", "only after: t (f1)"]
    assert compare(old, [Score("t", (Metric("f1", 0.5),), 100, 100)], every_metric=True) == []


def test_a_comparison_says_what_its_sides_are_and_what_unpaired_means() -> None:
    old, new = fake_report(tasks=3), replace(fake_report(tasks=3), model="other", checkpoint="ab" * 16)
    text = comparison(old, new, compare(old.scores, new.scores), ["only after: x"])
    assert text.splitlines()[:2] == [
        f"before  core-63 of llama-7b-fake ({old.checkpoint[:12]})",
        "after   core-63 of other (abababababab)",
    ]
    assert "(unpaired): the two means were compared" in text and text.endswith("only after: x\n")
    paired = differences(compare([score("t", [1.0, 0.0] * 9)], [score("t", [1.0, 0.0] * 9)]))
    assert "unpaired" not in paired


def test_no_verdict_at_all_is_no_number() -> None:
    none = [Score("t", (Metric("acc", math.nan, math.nan),), 9, 0), Score("u", (), 9, 0)]
    (d,) = compare(none, [mean("t", 0.5, 9)])
    assert (d.verdict, d.p) == ("unknown", None)
    assert finite({"a": [math.nan, 1.0]}) == {"a": [None, 1.0]}
    report = replace(fake_report(tasks=3), scores=tuple(none))
    assert "nan" not in differences([d]) + table(report)


def test_nodes_without_compiled_bytecode_are_told() -> None:
    report = fake_report()
    assert "bytecode" not in table(report)
    slow = replace(report, workers=tuple(replace(w, uncompiled=2610) for w in report.workers))
    nodes = ", ".join(sorted({w.node for w in report.workers}))
    line = next(line for line in table(slow).splitlines() if "bytecode" in line)
    assert (
        line.startswith(f"Starts on {nodes} are slower") and "2,610 modules" in line and "compileall" in line
    )


def two_metrics(r: random.Random, n: int, fall: int) -> tuple[Score, Score]:
    """The second metric falls on `fall` samples; the first one stays."""
    first = [float(r.random() < 0.5) for _ in range(n)]
    second = [float(r.random() < 0.6) for _ in range(n)]
    found = []
    for values in (second, flips(r, second, fall)):
        metrics = tuple(Metric(k, sum(v) / n, 0.5 / n**0.5) for k, v in (("acc", first), ("norm", values)))
        found.append(
            Score(
                "t",
                metrics,
                n,
                n,
                prompt_hash="p",
                per_sample=tuple(first),
                values={"acc": tuple(first), "norm": tuple(values)},
            )
        )
    return found[0], found[1]


def test_a_fall_is_found_whichever_metric_it_is() -> None:
    r = random.Random(2)
    for _ in range(50):
        old, new = two_metrics(r, 1000, 24)
        assert [(d.metric, d.verdict, d.paired) for d in compare([old], [new], every_metric=True)] == [
            ("acc", "same", True),
            ("norm", "worse", True),
        ]
    assert [d.metric for d in compare([old], [new], metrics=["norm"])] == ["norm"]
    led = [s.led_by("norm") for s in (old, new)]
    assert [(d.metric, d.verdict) for d in compare(led[:1], led[1:])] == [("norm", "worse")]
    assert led[0].of("acc") == old.of("acc") and led[0].led_by("acc").metrics == old.metrics
    with pytest.raises(KeyError, match="acc, norm"):
        old.led_by("f1")


def test_few_samples_prove_little() -> None:
    two = compare([score("t", [1.0, 1.0, 1.0])], [score("t", [0.0, 0.0, 1.0])])[0]
    assert two.p == 0.5 and two.verdict == "same"
    assert paired_p([-1.0, -1.0]) == 0.5 and paired_p([]) == 1.0 and paired_p([0.0, 0.0]) == 1.0
    assert paired_p([1.0] * 5 + [-1.0] * 5) == 1.0
    assert paired_p([-1.0] * 10) == pytest.approx(2 / 1024)
    assert paired_p([0.3, 0.1, 0.2]) == pytest.approx(0.25), "all signs: two of eight are as far out"
    assert 0 < paired_p([-1.0] * 2000) < 1e-300 or paired_p([-1.0] * 2000) == 0.0
    (apart,) = compare(
        [Score("t", (Metric("a", 1.0, 0.0),), 2, 2)], [Score("t", (Metric("a", 0.0, 0.0),), 2, 2)]
    )
    assert apart.p == pytest.approx(1 / 3)


@pytest.mark.parametrize("n", [3, 40, *(pytest.param(n, marks=pytest.mark.slow) for n in (12, 400))])
def test_the_paired_test_flags_as_rarely_as_promised(n: int) -> None:
    r = random.Random(11 + n)
    flagged = sum(paired_p([r.gauss(0, 1) for _ in range(n)]) <= 0.05 for _ in range(1500))
    assert flagged <= 0.07 * 1500


def test_perplexities_are_compared_by_their_log_likelihoods() -> None:
    r = random.Random(3)
    words = [r.randrange(50, 200) for _ in range(60)]
    old = [-4.0 * w + r.gauss(0, 20) for w in words]
    new = [x - 0.02 * w for x, w in zip(old, words, strict=True)]

    def one(values: list[float]) -> Score:
        ppl = math.exp(-sum(values) / sum(words))
        metric = Metric("word_perplexity,none", ppl, None, higher_is_better=False)
        return Score("wiki", (metric,), 60, 60, prompt_hash="p", values={metric.name: tuple(values)})

    (d,) = compare([one(old)], [one(new)])
    assert d.verdict == "worse" and d.paired and d.p is not None and d.p < 1e-10 and d.stderr is not None
    assert abs(d.after - d.before) > 3 * d.stderr > 0
    assert compare([one(old)], [one(old)])[0].verdict == "same"


def test_where_nothing_was_answered_no_gpu_was_spared() -> None:
    s = Score("t", (), 10, 0, tuple(SampleNote(i, "unanswered", "500") for i in range(10)))
    text = table(Report("s", "m", "c", 0.0, 1.0, (s,), {}, (), (), (), 0.0, 0.0, 0.0))
    assert "No answer was given" in text and "there already" not in text
