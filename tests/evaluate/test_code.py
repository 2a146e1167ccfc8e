"""Generated programs: only those that reach the end of their tests pass."""

from __future__ import annotations

import itertools
import math

import pytest

from unbroken.evaluate.scoring import code
from unbroken.evaluate.scoring.code import check, extract_code, pass_at_k, passes
from unbroken.evaluate.scoring.judge import Unscored
from unbroken.evaluate.scoring.sandbox import SandboxUnavailable, sandbox_kind

ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"
needs_sandbox = pytest.mark.skipif(
    sandbox_kind().startswith("none"), reason=f"no sandbox here: {sandbox_kind()}"
)


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "why"),
    [
        (ADD, ""),
        ("def add(a, b):\n    return a - b\n", "assertion"),
        ("def add(a, b)\n    return a", "error: SyntaxError"),
        ("x = 1\n", "error: NameError"),
        ("import sys\nsys.exit(0)\n", "exit"),
        ("import os\nos._exit(77)\n", "exit"),
        ("import os\nos.write(2, b'unbroken-passed\\n')\nos._exit(77)\n", "exit"),
        ("x = []\nwhile True:\n    x.append(bytearray(1 << 22))\n", "memory"),
        ("while True:\n    pass\n", "timeout"),
        ("import os\nos.kill(os.getpid(), 9)\n", "killed"),
        (f"{ADD}import socket\nsocket.create_connection(('127.0.0.1', 22), 1)\n", "error: "),
        (f"{ADD}open('/etc/unbroken-was-here', 'w')\n", "error: "),
        (f"{ADD}open('note.txt', 'w').write('mine')\nassert open('note.txt').read() == 'mine'\n", ""),
        ("# \udcff\n" + ADD, ""),
    ],
)
def test_verdicts(program: str, why: str) -> None:
    verdict = check(program, TESTS, cpu_s=1.0, memory=200 << 20, address_space=300 << 20)
    assert verdict.passed == (why == "")
    assert verdict.why.startswith(why)


@needs_sandbox
def test_a_machine_that_is_slow_by_the_clock_changes_no_verdict() -> None:
    waits = "import time\ntime.sleep(1.3)\n" + ADD
    assert check(waits, TESTS, cpu_s=1.0).passed, "it used hardly any processor time"


@needs_sandbox
def test_a_float_for_a_score() -> None:
    assert passes(ADD, TESTS) == 1.0
    assert passes("def add(a, b): return 0", TESTS) == 0.0


def test_without_a_sandbox_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise SandboxUnavailable("no sandbox works here")

    monkeypatch.setattr(code, "run", refuse)
    with pytest.raises(Unscored, match="no sandbox works here"):
        passes(ADD, TESTS)


def test_code_is_taken_from_the_last_fence_of_its_language() -> None:
    assert (
        extract_code("Here:\n```python\na = 1\n```\nor\n```python\nb = 2\n```\nRun:\n```bash\nls\n```")
        == "b = 2\n"
    )
    assert extract_code("```py\na = 1\n```") == "a = 1\n"
    assert extract_code("```\na = 1\n```") == "a = 1\n"
    assert extract_code("```python\na = 1") == "a = 1", "cut off at the token limit"
    assert extract_code("a = 1\n") == "a = 1\n"


def test_pass_at_k_is_the_share_of_draws_with_a_pass() -> None:
    for total, passed, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if passed > total or k > total:
            continue
        programs = [i < passed for i in range(total)]
        draws = list(itertools.combinations(programs, k))
        assert math.isclose(pass_at_k(total, passed, k), sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="at least 3"):
        pass_at_k(2, 1, 3)
    with pytest.raises(ValueError, match="out of 2"):
        pass_at_k(2, 3, 1)
