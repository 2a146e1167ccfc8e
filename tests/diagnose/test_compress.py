"""Chatter goes, evidence stays, and what was learnt can be read and used again."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from unbroken.diagnose.compress import Compressor, FilterRule, compress, compress_live, template_regex
from unbroken.diagnose.match.rules import builtin, compile_safe
from unbroken.diagnose.read.sources import expand


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
    real = [t for _, t in kept if not t.startswith("[... ")]
    assert c.report.lines_in == 3999 and sum(c.report.dropped.values()) + c.report.folded == 3999 - len(real)


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
def test_no_event_is_dropped_and_its_repeats_are_counted(rule: object) -> None:
    example = rule.example  # type: ignore[attr-defined]
    body = (
        [megatron(n) for n in range(1, 300)] + [example + "\n"] * 5 + [megatron(n) for n in range(300, 600)]
    )
    _, kept = run("".join(body))
    shown = [t for _, t in kept].count(example)
    folds = [t for _, t in kept if t.startswith("[... ")]
    assert shown == 5 or (shown == 3 and any("2 more like" in f for f in folds)), folds


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

    cases = sorted(
        c for name in ("failure_logs", "failure_logs_wild") for c in (shared_data / name).glob("c*/case.json")
    )
    assert len(cases) > 100
    for case in cases:
        label = json.loads(case.read_text())
        kept: dict[tuple[str, int], bytes] = {}
        compress(expand([case.parent]).logs, lambda s, n, r, kept=kept: kept.setdefault((s.name, n), r))  # type: ignore[misc]
        if (label["evidence_file"], label["evidence_line"]) in kept:
            continue
        # A slow divergence has no decisive line: its label takes any step after it began, and many have to be left.
        assert label["evidence_hits"] > 200, case.parent.name
        fits = re.compile(label["evidence"].encode())
        steps = [n for (name, n), r in kept.items() if name == label["evidence_file"] and fits.search(r)]
        assert len(steps) >= 10 and min(steps) <= label["evidence_line"], case.parent.name


def test_complete_public_logs_become_small(shared_data: Path) -> None:
    for path in sorted((shared_data / "logs" / "slurm_endings").iterdir()):
        report = compress(expand([path]).logs, lambda s, n, r: None)
        assert report.lines_out <= 100 and report.bytes_out < 0.04 * report.bytes_in, path.name


def _training_logs() -> ModuleType:
    name = "benchmark_training_logs"
    if name not in sys.modules:
        path = Path(__file__).parents[2] / "benchmarks" / "training_logs.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.mark.parametrize("style", _training_logs().STYLES)
def test_messy_logs_of_each_framework_become_small_and_keep_the_root(style: str, tmp_path: Path) -> None:
    logs = _training_logs()
    text, at = logs.log(style, 5, logs.ROOT, steps=600)
    (tmp_path / "log").write_text(text)
    kept: list[tuple[int, bytes]] = []
    report = compress(expand([tmp_path / "log"]).logs, lambda s, n, r: kept.append((n, r)))
    real = {n for n, r in kept if not r.startswith(b"[... ")}
    assert report.lines_out <= 400 and report.bytes_out <= 0.08 * report.bytes_in
    assert all(n in real for n in range(at - 4, at + 1)), "the whole traceback"
    assert any(b"as in the last launch" in r for _, r in kept), "the second launch had the same arguments"


def test_what_differs_from_the_last_launch_is_said() -> None:
    names = [f"option_{chr(97 + i)}{chr(97 + j)}" for i in range(5) for j in range(8)]
    dump = [f"  {n} {'.' * 20} {len(n)}\n" for n in names]
    again = [*dump[:7], "  option_ah .................... 4096\n", *dump[8:]]
    middle = [megatron(n) for n in range(1, 50)] + ["ValueError: x\n"] + [megatron(n) for n in range(50, 90)]
    _, kept = run("".join([*dump, *middle, *again, *middle]))
    folds = [t for _, t in kept if t.startswith("[... ")]
    assert any("but option_ah 9 -> 4096" in f for f in folds), folds


def test_a_log_that_is_written_is_compressed_as_it_comes(tmp_path: Path) -> None:
    path, ended, kept = tmp_path / "log", threading.Event(), []
    path.write_text("".join(megatron(n) for n in range(1, 500)))
    writer = threading.Thread(
        target=lambda: compress_live(path, lambda n, r: kept.append((n, r)), ended=ended.is_set, pause=0.01)
    )
    writer.start()
    with path.open("a") as f:
        f.write("ValueError: x\n")
        f.flush()
        deadline = time.monotonic() + 60
        while not any(r == b"ValueError: x" for _, r in kept):
            assert time.monotonic() < deadline, "shown while the log is still written"
            time.sleep(0.01)
        f.write("cut of")
    ended.set()
    writer.join(60)
    assert kept[-1] == (501, b"cut of") and len(kept) < 60
