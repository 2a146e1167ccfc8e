"""Answers of many tokens: cut short and marked where their time is over, not asked twice, the longest begun first by what another
checkpoint's answers were."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from unbroken.errors import EvaluationError
from unbroken.evaluate.contracts import Answer, Json, PreparedTask, Request, Sample, Task
from unbroken.evaluate.contracts.samples import prompt_hash
from unbroken.evaluate.plan.priors import Expected
from unbroken.evaluate.result.folder import EvalDir
from unbroken.evaluate.result.lengths import block_weights, learnt_lengths
from unbroken.evaluate.result.sameness import check_of, chosen
from unbroken.evaluate.run.tasks.scoring_queue import ScoringQueue
from unbroken.evaluate.run.tasks.tasks import _work
from unbroken.evaluate.suite import received, staged
from unbroken.evaluate.suite.asking import answers_of, cut_short


def prepared(folder: Path, n: int = 8, tokens: int = 64) -> PreparedTask:
    rows = []
    for i in range(n):
        asked = (Request("generate_until", (f"prompt {i}", {"until": [], "max_gen_toks": tokens})),)
        rows.append(Sample(i, asked, prompt_hash(asked)))
    wrote = staged.write_samples(folder, rows, block=2)
    return PreparedTask(
        Task("t"), "1", n, 2, str(folder), wrote.prompt_hash, wrote.weights, output_tokens=tokens
    )


def test_an_answer_that_was_cut_short_is_marked_on_its_way_and_on_disk(tmp_path: Path) -> None:
    p = prepared(tmp_path, 2)
    samples = staged.read_samples(tmp_path, range(2))
    outputs: list[Json] = [cut_short("so far", 3, 0.5), "whole"]
    cut, whole = answers_of(samples, outputs)
    assert cut == Answer(0, samples[0].prompt_hash, ("so far",), "", "its 0.5 s were over after 3 tokens")
    assert whole.partial == "" and whole.outputs == ("whole",)
    for a in (cut, whole):
        assert staged.decode_answer(staged.encode_answer(a)) == a
    assert "partial" not in staged.encode_answer(whole)
    sent = [
        {"sample": a.sample, "hash": a.prompt_hash, "outputs": list(a.outputs), "partial": a.partial}
        for a in (cut, whole)
    ]
    kept = received.answers(sent, range(2), *received.asked(p, range(2)))
    assert kept[0]["partial"] == cut.partial and "partial" not in kept[1]


def test_long_answers_are_asked_twice_seldom_or_not_at_all(tmp_path: Path) -> None:
    assert len(chosen(400)) == 16 and len(chosen(400, 256)) == 8 and len(chosen(400, 2000)) == 4
    assert check_of(prepared(tmp_path / "a", tokens=4096)).samples == 4
    with pytest.raises(EvaluationError, match="16,384 tokens are not asked twice"):
        check_of(prepared(tmp_path / "b", tokens=16384))


@pytest.mark.parametrize(("n", "tokens"), [(40, 64), (100, 256), (400, 2000)])
def test_answers_of_both_ways_are_compared_sample_by_sample(tmp_path: Path, n: int, tokens: int) -> None:
    """However many of them are asked twice: long ones are fewer than their task's size alone says."""
    p, folder = prepared(tmp_path / "task", n, tokens), EvalDir(tmp_path / "out")
    check, hashes = check_of(p), staged.read_hashes(Path(p.folder))

    def write(path: Path, prepared: PreparedTask, texts: list[str]) -> None:
        own = staged.read_hashes(Path(prepared.folder))
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [Answer(i, h, (t,)) for i, (h, t) in enumerate(zip(own, texts, strict=True))]
        path.write_text("".join(staged.encode_answer(a) + "\n" for a in rows))

    def merge(prepared: PreparedTask, given_up: dict[int, str], target: Path) -> tuple[()]:
        # Each text names its prompt; the last one is another text.
        asked = [hashes.index(h) for h in staged.read_hashes(Path(prepared.folder))]
        write(target, prepared, [f"text {i}" for i in asked[:-1]] + ["another"])
        return ()

    write(folder.exact_answers("key", "t"), p, [f"text {i}" for i in range(n)])
    queue = ScoringQueue(folder, "key", "c", SimpleNamespace(merge=merge), lambda: None, lambda: None)  # type: ignore[arg-type,return-value]
    found, job = queue._write_check(check, p)
    assert len(found.ids) == check.samples and found.differ == found.ids[-1:] and job is not None


def landed(folder: Path, key: str, p: PreparedTask, lengths: list[int], written: float) -> None:
    place = folder / key / "t.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    hashes = staged.read_hashes(Path(p.folder))
    rows = [Answer(i, hashes[i], ("x" * n,)) for i, n in enumerate(lengths)]
    place.write_text("".join(staged.encode_answer(a) + "\n" for a in rows))
    os.utime(place, (written, written))


def test_the_longest_blocks_of_the_newest_other_checkpoint_come_first(tmp_path: Path) -> None:
    p, answers = prepared(tmp_path / "task"), tmp_path / "landed"
    assert learnt_lengths(answers, "new", p) is None
    landed(answers, "old", p, [900, 1, 1, 1, 1, 1, 1, 1], 1000.0)
    landed(answers, "newer", p, [1, 1, 1, 1, 1, 900, 10, 1], 2000.0)
    landed(answers, "new", p, [1, 1, 900, 1, 1, 1, 1, 1], 3000.0)  # its own: of an earlier command
    lengths = learnt_lengths(answers, "new", p)
    assert lengths is not None and lengths[5] == 900
    work = _work(p, [0, 1, 2, 3], Expected(10.0, 2.0, 0.0, "test"), lengths)
    assert work.numbers == (2, 3, 0, 1) and sum(work.block_s) == pytest.approx(10.0)
    assert work.block_s[0] > 5 * work.block_s[1]
    assert _work(p, [0, 1, 3], Expected(10.0, 2.0, 0.0, "test")).numbers == (0, 1, 3)
    assert block_weights(p, [1.0] * 8) == pytest.approx([2.4] * 4)


def test_lengths_of_other_prompts_or_of_tasks_without_texts_say_nothing(tmp_path: Path) -> None:
    p, answers = prepared(tmp_path / "task"), tmp_path / "landed"
    landed(answers, "old", p, [5, 6, 7], 1000.0)  # fewer than half
    assert learnt_lengths(answers, "new", p) is None
    (answers / "old" / "t.jsonl").write_text("torn {")
    assert learnt_lengths(answers, "new", p) is None
    landed(answers, "old", p, [4, 4, 4, 4, 8, 8, 8], 1000.0)
    lengths = learnt_lengths(answers, "new", p)
    assert lengths is not None and lengths[7] == pytest.approx(40 / 7)  # the mean
    assert learnt_lengths(answers, "new", replace(p, output_tokens=0.0)) is None
