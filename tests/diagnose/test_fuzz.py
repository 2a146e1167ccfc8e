"""Readers that meet anything: no crash, no endless line, no verdict outside the contract."""

from __future__ import annotations

import random
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.failure_logs import KINDS, make
from unbroken.diagnose import Verdict, diagnose
from unbroken.diagnose.compress import Compressor
from unbroken.diagnose.match.rules import builtin, builtin_set
from unbroken.diagnose.match.topology import expand_hosts
from unbroken.diagnose.read.clock import find
from unbroken.diagnose.read.prefixes import clean, take_apart
from unbroken.diagnose.read.progress_lines import read
from unbroken.errors import UnbrokenError

PIECES = [r.example for r in builtin()] + [
    "Traceback (most recent call last):", '  File "x.py", line 3, in f', "The above exception was the direct cause of the following exception:", "",
    "[rank3]: ", "2026-01-07 23:30:26 ", "Jan  7 23:30:26 node-1 kernel: ", "  exitcode  : 1 (pid: 3)", "  rank      : 9999999999 (local_rank: 3)", "\r", "\0", "\x1b[31m",
    "step: 99999999999999999999 loss: 1e999", "loss: nan", "iteration 3/3 | lm loss: inf |", "nodelist=node-[0-99999999999]", "99:99:99 99/99/9999 00:00:00",
]  # fmt: skip
line = st.one_of(
    st.sampled_from(PIECES), st.text(max_size=120), st.binary(max_size=80).map(lambda b: b.decode("latin-1"))
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.lists(line, max_size=4).map("".join), max_size=60))
def test_any_lines_give_a_verdict_in_the_contract(rows: list[str], tmp_path: Path) -> None:
    log = tmp_path / "fuzz.log"
    log.write_bytes("\n".join(rows).encode("utf-8", "replace"))
    try:
        v = diagnose([log])
    except UnbrokenError as e:
        assert "not a text log" in str(e)
        return
    assert Verdict.from_json(v.as_json()) == v
    if v.root is not None and v.root.line is not None:
        assert 1 <= v.root.line <= log.read_bytes().count(b"\n") + 1


@settings(max_examples=80, deadline=None)
@given(data=st.binary(max_size=3000))
def test_small_readers_take_anything(data: bytes) -> None:
    text = clean(data)
    take_apart(text, 2026)
    find(text, 2026)
    read(text)
    expand_hosts(text)
    list(Compressor().lines(iter([data])))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), cut=st.floats(0.1, 0.99), flips=st.integers(0, 40))
def test_damaged_logs_of_real_kinds(seed: int, cut: float, flips: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    lines, _ = make(rng.choice(KINDS), rng.choice(["megatron", "hf", "titan", "plain"]), seed, seed % 8)
    data = bytearray("\n".join(lines).encode()[: int(len("\n".join(lines)) * cut)])
    for _ in range(flips):
        data[rng.randrange(len(data))] = rng.randrange(256)
    (tmp_path / "x.log").write_bytes(bytes(data))
    v = diagnose([tmp_path / "x.log"])
    assert Verdict.from_json(v.as_json()) == v


def test_no_line_takes_more_than_linear_time(tmp_path: Path) -> None:
    worst = [
        "Error " * 40_000,
        "a." * 100_000 + "Error: x",
        "[" * 200_000,
        "1:" * 100_000,
        "File " * 50_000,
        " " * 200_000 + "Error",
        "x=" * 100_000 + "failed",
        "(" * 100_000 + "RuntimeError",
        "rank" * 60_000,
        "loss:" * 60_000,
        "failed " * 40_000,
        "\t" * 200_000,
    ]
    log = tmp_path / "worst.log"
    for text in worst:
        log.write_text((text + "\n") * 3)
        start = time.process_time()
        diagnose([log])
        list(Compressor().lines(iter([log.read_bytes()])))
        assert time.process_time() - start < 3.0, text[:20]


def test_rules_stay_linear_without_re2() -> None:
    import re

    texts = [
        "a" * 2000,
        "." * 2000,
        "a." * 1000,
        "/a" * 1000,
        "Error " * 330,
        "NCCL WARN " * 200,
        "ncclUniqueId from " * 110,
        "1" * 2000,
        " " * 2000,
        "NET/IB : Got completion from peer " * 60,
    ]
    for rule in builtin_set().rules:
        compiled = re.compile(rule.regex)
        start = time.process_time()
        for text in texts:
            compiled.search(text)
        assert time.process_time() - start < 0.5, rule.id
