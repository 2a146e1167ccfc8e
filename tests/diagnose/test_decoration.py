"""Decoration is learnt per file: whatever launchers and loggers put around lines, rules see the bare text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.diagnose import diagnose
from unbroken.diagnose.read.clock import year_in
from unbroken.diagnose.read.decoration import PLAIN, Bare, JsonFields, Learner, learn, learn_from
from unbroken.diagnose.read.sources import blocks, expand

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 88, in <module>',
    "    main()",
    '  File "/app/train.py", line 70, in main',
    "    width = table[name]",
    "KeyError: 'swiglu_width'",
]


def a_log(steps: int = 40) -> list[str]:
    """A training log of one process that ends with a KeyError."""
    lines = [
        "loading the tokenizer from /data/tok.json",
        "model: 1.3B parameters, bf16",
        "optimizer: adamw, 2 groups",
    ]
    lines += [f"2026-03-01 10:{i // 6:02d}:{i % 6 * 10:02d} step {i * 10} loss {3 - i / 100:.3f} lr 1e-4" for i in range(1, steps)]  # fmt: skip
    return lines + TRACEBACK


def _docker(line: str) -> str:
    return json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-01-12T09:00:00.000000417Z"})


def _gcp(line: str) -> str:
    return json.dumps({"insertId": "x1", "resource": {"type": "k8s_container"}, "severity": "ERROR", "textPayload": line, "timestamp": "2026-01-12T09:00:00Z"})  # fmt: skip


def _nested(line: str) -> str:
    return _docker(json.dumps({"level": "info", "msg": line, "ts": "2026-01-12T09:00:00Z"}))


DECORATIONS: dict[str, Callable[[int, str], str]] = {
    "constant word": lambda i, x: f"[TRAIN] {x}",
    "constant word, indentation lost": lambda i, x: f"[TRAIN] {x.strip()}",
    "compose": lambda i, x: f"trainer-1  | {x}",
    "compose, indentation lost": lambda i, x: f"trainer-1  | {x.strip()}",
    "compose with times": lambda i, x: f"2026-06-02T20:00:{i % 60:02d}.120Z trainer-1  | {x}",
    "mpirun": lambda i, x: f"[1,3]<stderr>:{x}",
    "mpirun, older": lambda i, x: f"[1,3]<stderr>: {x}",
    "srun --label": lambda i, x: f"3: {x}",
    "srun --label, wide": lambda i, x: f"  3: {x}",
    "stern": lambda i, x: f"train-worker-0 pytorch {x}",
    "kubectl --prefix": lambda i, x: f"[pod/train-worker-0/pytorch] {x}",
    "foreman": lambda i, x: f"10:{i // 60 % 60:02d}:{i % 60:02d} worker.1 | {x}",
    "shell arrow": lambda i, x: f"node7> {x}",
    "pdsh": lambda i, x: f"node-7: {x}",
    "own stamp": lambda i, x: f"[03/01 10:{i // 60 % 60:02d}:{i % 60:02d} trainer.core]: {x}",
    "docker": lambda i, x: _docker(x),
    "gcp": lambda i, x: _gcp(x),
    "json in docker": lambda i, x: _nested(x),
    "json in compose": lambda i, x: "trainer-1  | " + json.dumps({"message": x, "level": "info"}),
    "own field": lambda i, x: json.dumps({"seq": str(i), "words": x, "src": "fit"}),
}


@pytest.mark.parametrize("how", DECORATIONS)
def test_the_same_failure_is_found_under_each(how: str, tmp_path: Path) -> None:
    lines = a_log()
    (tmp_path / "log.txt").write_text("\n".join(DECORATIONS[how](i, x) for i, x in enumerate(lines)) + "\n")
    v = diagnose([tmp_path / "log.txt"])
    assert v.reason == "KeyError" and v.root is not None
    assert v.root.line == len(lines) and "KeyError: 'swiglu_width'" in v.root.text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_encodings_are_read_with_the_same_line_numbers(encoding: str, tmp_path: Path) -> None:
    lines = a_log()
    (tmp_path / "log.txt").write_bytes("\r\n".join([*lines, ""]).encode(encoding))
    v = diagnose([tmp_path / "log.txt"])
    assert v.reason == "KeyError" and v.root is not None and v.root.line == len(lines)
    (source,) = expand([tmp_path / "log.txt"]).logs
    assert b"".join(blocks(source, [], size=4097)).decode().splitlines() == lines


def test_a_part_in_utf_16_behind_one_in_utf_8_is_read(tmp_path: Path) -> None:
    lines = a_log()
    whole = "\n".join(lines[:-6]).encode() + b"\n" + ("\n".join(lines[-6:]) + "\n").encode("utf-16-le")
    (tmp_path / "log.txt").write_bytes(whole + b"\0" * 10_000)
    v = diagnose([tmp_path / "log.txt"])
    assert v.reason == "KeyError" and v.root is not None and v.root.line == len(lines)


def test_an_exception_in_a_field_of_a_structured_logger_is_its_traceback(tmp_path: Path) -> None:
    lines = [json.dumps({"event": f"step {i} loss 3.1 of the run", "level": "info", "timestamp": f"2026-01-13T09:00:{i:02d}Z"}) for i in range(30)]  # fmt: skip
    lines.append(json.dumps({"event": "run ended", "level": "error", "exc_info": "\n".join(TRACEBACK)}))
    (tmp_path / "log.txt").write_text("\n".join(lines) + "\n")
    v = diagnose([tmp_path / "log.txt"])
    assert v.reason == "KeyError" and v.root is not None and v.root.line == len(lines)
    assert v.root.text == "KeyError: 'swiglu_width'"


def test_a_tag_that_shows_itself_only_with_the_traceback_is_learnt_there(tmp_path: Path) -> None:
    lines = [*a_log()[:-6], *(f"ERR#7>> {x}" for x in TRACEBACK)]
    (tmp_path / "log.txt").write_text("\n".join(lines) + "\n")
    v = diagnose([tmp_path / "log.txt"])
    assert v.reason == "KeyError" and v.root is not None and v.root.line == len(lines)


def test_two_ranks_behind_tags_are_kept_apart(tmp_path: Path) -> None:
    lines = [f"[1,0]<stdout>:{x}" for x in a_log()[:-6]]
    for a, b in zip(TRACEBACK, [x.replace("KeyError: 'swiglu_width'", "KeyError: 'other'") for x in TRACEBACK], strict=True):  # fmt: skip
        lines += [f"[1,5]<stderr>:{a}", f"[1,2]<stderr>:{b}"]
    (tmp_path / "log.txt").write_text("\n".join(lines) + "\n")
    v = diagnose([tmp_path / "log.txt"])
    assert v.root is not None and v.root.rank == 5 and "swiglu_width" in v.root.text


@pytest.mark.parametrize(
    "line",
    [
        " [2026-03-20 11:31:{s}] iteration {n:8d}/  900000 | lm loss: 2.1E+00 | grad norm: 1.2 |",
        "step {n} | loss 2.31 | lr 1e-4",
        "step: {n}, loss: 2.31",
        "{{'loss': 2.31, 'step': {n}}}",
        '{{"loss": 2.31, "step": {n}}}',
        "Epoch {n}: loss 2.31",
        "INFO:root:step {n} loss 2.31",
    ],
)
def test_metric_lines_are_no_decoration(line: str) -> None:
    rows = [line.format(n=n * 10, s=f"{n % 60:02d}") for n in range(1, 80)]
    extra = ["saving a checkpoint", "eval loss 2.2", "INFO done"]
    layers = learn(rows + extra)
    assert [b.text for r in rows for b in layers.lines(r)] == rows


def test_a_plain_file_has_none_and_few_lines_teach_nothing() -> None:
    assert learn(a_log()) is PLAIN or not learn(a_log())
    assert not learn(TRACEBACK[:4]) and not learn([])
    assert not learn_from(b"") and not learn_from(b"\n\n")


def test_a_json_data_sample_among_plain_lines_is_not_unwrapped(tmp_path: Path) -> None:
    lines = a_log()[:-6]
    lines.insert(20, json.dumps({"text": "\n".join(TRACEBACK), "id": "doc 7"}))
    (tmp_path / "log.txt").write_text("\n".join(lines) + "\n")
    v = diagnose([tmp_path / "log.txt"])
    assert v.reason != "KeyError"


def test_the_learner_of_many_files_gives_what_each_file_alone_gives() -> None:
    learner = Learner(12)
    words = ("step", "saved", "loading", "evaluating", "warming up", "reading")
    for i in range(40):
        tag = f"trainer-{i % 7}  | " if i % 2 else ""
        block = "".join(f"{tag}{words[(n + i // 4) % 6]} {n} of {i}\n" for n in range(40)).encode()
        assert learner(block) == learn_from(block, 12)


def test_fields_are_found_by_any_of_their_names_whatever_objects_came_before() -> None:
    """Which names lead somewhere is known by an object's keys; another object has others."""
    fields = JsonFields("message")
    for name, rank in (("rank", 3), ("global_rank", 4)):
        (bare,) = fields.strip(Bare(f'{{"message": "lost", "{name}": {rank}, "severity": "warn"}}'))
        assert (bare.text, bare.rank, bare.level) == ("lost", rank, "WARNING")
    nested = '{"message": "lost", "record": {"extra": {"rank": 5}, "exception": "ValueError: x"}, "error.message": "y"}'
    bares = fields.strip(Bare(nested))
    assert [(b.text, b.rank, b.part) for b in bares] == [("lost", 5, 0), ("y", 5, 1), ("ValueError: x", 5, 2)]


@pytest.mark.parametrize(
    ("text", "year"),
    [
        ("x 2026-03-20", 2026),
        ("v12026-03-20 then 2025/01/02", 2025),
        ("a_2026-03-20", None),
        ("2026-13-20", None),
    ],
)
def test_a_year_is_no_part_of_a_longer_word(text: str, year: int | None) -> None:
    assert year_in(text) == year
