"""Chatter goes, evidence stays, and what was learnt can be read and used again."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from unbroken.diagnose.compress import Compressor, FilterRule, compress, template_regex
from unbroken.diagnose.rules import builtin, compile_safe
from unbroken.diagnose.sources import expand


def run(
    text: str, rules: list[FilterRule] | None = None, **kw: object
) -> tuple[Compressor, list[tuple[int, str]]]:
    c = Compressor(rules or [], **kw)  # type: ignore[arg-type]
    return c, [(n, r.decode()) for n, r in c.lines(iter([text.encode()]))]


def megatron(n: int, loss: float = 2.0, nan: int = 0) -> str:
    return f" [2026-03-20 11:{n // 60 % 60:02d}:{n % 60:02d}] iteration {n:8d}/  900000 | lm loss: {loss:.6E} | grad norm: 0.378 | number of skipped iterations:   0 | number of nan iterations:   {nan} |\n"


STYLES = {
    "megatron": megatron,
    "titan": lambda n, loss=2.0: f"[rank0]:[titan] 2026-01-07 23:{n // 60 % 60:02d}:{n % 60:02d},360 - root - INFO - step: {n:5d}  loss:  {loss:.4f}  grad_norm:  0.35\n",
    "hf": lambda n, loss=2.0: f"{{'loss': {loss:.4f}, 'grad_norm': 0.3746, 'learning_rate': 1.56992e-05, 'epoch': {n / 1000:.4f}}}\n",
    "nemo": lambda n, loss=2.0: f"Training epoch 0, iteration {n}/249999 | lr: 0.0001351 | reduced_train_loss: {loss:.4f} | consumed_samples: {n * 512}\n",
    "deepspeed": lambda n, loss=2.0: f"steps: {n} loss: {loss:.4f} iter time (s): 5.409 samples/sec: 378.599\n",
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_metric_logs_shrink_and_keep_what_leaps(style: str) -> None:
    line, rng = STYLES[style], random.Random(3)
    body = [line(n, loss=2.0 + rng.random() * 0.08) for n in range(1, 4000)]  # type: ignore[operator]
    body[2500] = line(2501, loss=9.7)  # type: ignore[operator]
    c, kept = run("".join(body))
    assert any(n == 2501 for n, _ in kept), "a loss that leaps is evidence"
    assert len(kept) < 40
    assert c.report.lines_in == 3999 and sum(c.report.dropped.values()) == 3999 - len(kept)


def test_an_iteration_that_was_no_number_is_kept() -> None:
    body = [megatron(n) for n in range(1, 3000)]
    body[1500] = megatron(1501, nan=1)
    _, kept = run("".join(body))
    assert any(n == 1501 for n, _ in kept)
    body[1500] = megatron(1501).replace("2.000000E+00", "nan")
    assert any(n == 1501 for n, _ in run("".join(body))[1])
    body[1500] = megatron(1501).replace("2.000000E+00", "2.000000E+07")
    assert any(n == 1501 for n, _ in run("".join(body))[1]), "same digits, another exponent"


@pytest.mark.parametrize(
    "rule",
    [r for r in builtin() if r.role in ("root", "either", "cascade", "ending") and r.where != "tail"],
    ids=lambda r: r.id,
)
def test_no_event_is_ever_dropped(rule: object) -> None:
    example = rule.example  # type: ignore[attr-defined]
    body = (
        [megatron(n) for n in range(1, 300)] + [example + "\n"] * 5 + [megatron(n) for n in range(300, 600)]
    )
    _, kept = run("".join(body))
    assert [t for _, t in kept].count(example) == 5


def test_lines_around_an_event_and_the_last_ones_stay() -> None:
    body = (
        [megatron(n) for n in range(1, 500)]
        + ["RuntimeError: CUDA error: unspecified launch failure\n"]
        + [megatron(n) for n in range(500, 900)]
    )
    _, kept = run("".join(body))
    numbers = [n for n, _ in kept]
    assert {497, 498, 499, 500} <= set(numbers) and numbers[-1] == 900 and numbers == sorted(numbers)


def test_learnt_rules_can_be_read_and_used_from_the_first_line() -> None:
    text = "".join(megatron(n, 2 + n % 5 / 100) for n in range(1, 200)) + "NCCL INFO Channel 00 : 0 1 2\n" * 9
    first, _ = run(text)
    assert {r.kind for r in first.report.learnt} >= {"metric"}
    for r in first.report.learnt:
        compiled = compile_safe(r.regex, r.name)
        assert compiled.search(r.example)
    again, kept = run(text, first.report.learnt, learn=False)
    assert not again.report.learnt and len(kept) < 30
    assert set(again.report.dropped) <= {r.name for r in first.report.learnt}


def test_templates_keep_words_and_mask_numbers() -> None:
    regex = template_regex("step 12 loss 2.01 lr 1e-05", "step 13 loss 2.11 lr 1e-05")
    assert regex is not None
    assert re.search(regex, "step 99999 loss 0.1 lr 3e-06") and not re.search(
        regex, "step 13 failed 2.11 lr 1e-05"
    )
    assert template_regex("1 2 3", "4 5 6") is None, "nothing but variables is no template"


def test_blocks_of_any_size_give_the_same_result(tmp_path: Path) -> None:
    body = (
        "".join(megatron(n) for n in range(1, 400))
        + "ValueError: x\n"
        + "".join(megatron(n) for n in range(400, 800))
    )
    whole = Compressor()
    expected = list(whole.lines(iter([body.encode()])))
    rows = body.encode().splitlines(keepends=True)
    split = Compressor()
    pieces = (b"".join(rows[i : i + 37]) for i in range(0, len(rows), 37))
    assert [n for n, _ in split.lines(pieces)] == [n for n, _ in expected]


def test_over_files_and_without_a_newline_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("".join(megatron(n) for n in range(1, 300)) + "cut of")
    (tmp_path / "b.log").write_bytes(b"\x00\xff\xfe odd bytes \r\n" * 50)
    kept: list[tuple[str, int, bytes]] = []
    report = compress(expand([tmp_path]).logs, lambda s, n, r: kept.append((s.name, n, r)))
    assert ("a.log", 300, b"cut of") in kept
    assert report.lines_in == 350 and report.lines_out == len(kept) < 60
    assert report.as_json()["ratio"] > 4


def test_evidence_of_the_shared_cases_survives(shared_data: Path) -> None:
    import json

    cases = sorted((shared_data / "failure_logs").glob("c*/case.json"))
    assert cases
    for case in cases:
        label = json.loads(case.read_text())
        kept: set[tuple[str, int]] = set()
        compress(expand([case.parent]).logs, lambda s, n, r, kept=kept: kept.add((s.name, n)))  # type: ignore[misc]
        assert (label["evidence_file"], label["evidence_line"]) in kept, case.parent.name
