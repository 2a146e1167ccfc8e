"""Generated programs against their tests, in the sandbox: what a score.py for code calls.

    from unbroken.evaluate.scoring.code import passes, pass_at_k
    def score(row, output):
        program = extract_code(output)
        return passes(program, row["tests"])

One program, one sandbox, one processor: time is limited by what the program uses of the processor, not by the clock,
so that a slow or busy machine gives the same verdicts as a fast one.
"""

from __future__ import annotations

import math
import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .judge import Unscored
from .sandbox import SandboxLimits, SandboxUnavailable, run

LIMITS = SandboxLimits(cpu_s=10.0, memory=1 << 30, processes=32, scratch=64 << 20)
"""What a program may take where nothing else is said."""

_PASSED = 77
"""Exit code of a program whose tests have ended."""


@dataclass(frozen=True)
class ProgramResult:
    """Whether a program passed its tests, and if not, how it failed."""

    passed: bool
    why: str = ""
    """'assertion', 'error: NameError', 'timeout', 'memory', 'killed', 'exit' (it left before its tests had ended)."""
    seconds: float = 0.0
    stderr: str = ""


def passes(program: str, tests: str, **limits: Any) -> float:
    """1.0 if the program and then its tests run to the end without an error, else 0.0.

    `limits` are fields of `sandbox.Limits`. Raises Unscored where no sandbox works: nothing is run then, and the
    sample has no verdict.
    """
    return float(check(program, tests, **limits).passed)


def check(
    program: str,
    tests: str,
    *,
    files: Mapping[str, bytes] | None = None,
    readable: Iterable[Path | str] = (),
    isolated: bool = True,
    **limits: Any,
) -> ProgramResult:
    """As `passes`, with the reason. `isolated` hides site-packages from the program."""
    chosen = replace(LIMITS, **limits)
    # The last line is reached only if the tests were: a program that exits early has not passed them. The word is
    # another one each time, so that no program can have learnt to print it (one that reads its own file could).
    word = f"unbroken-passed-{secrets.token_hex(8)}"
    script = f"{program}\n\n{tests}\n\nimport os as _os\n_os.write(2, b'{word}\\n')\n_os._exit({_PASSED})\n"
    flags = ["-I", "-S"] if isolated else ["-I"]
    try:
        out = run(
            [sys.executable, *flags, "-B", "program.py"],
            chosen,
            files={**(files or {}), "program.py": script.encode("utf-8", "replace")},
            readable=readable,
        )
    except SandboxUnavailable as e:
        raise Unscored(str(e)) from e
    stderr = out.stderr.decode(errors="replace")
    if out.status != "done":
        return ProgramResult(False, out.status, out.seconds, stderr)
    if out.code == _PASSED and stderr.rstrip().endswith(word):
        return ProgramResult(True, "", out.seconds, "")
    if out.code in (0, _PASSED):
        return ProgramResult(False, "exit", out.seconds, stderr)
    last = (stderr.strip().splitlines() or [""])[-1]
    kind = last.partition(":")[0].strip()
    if kind == "AssertionError":
        return ProgramResult(False, "assertion", out.seconds, stderr)
    if kind == "MemoryError":
        return ProgramResult(False, "memory", out.seconds, stderr)
    return ProgramResult(False, f"error: {kind or out.code}", out.seconds, stderr)


def extract_code(reply: str, language: str = "python") -> str:
    """The last fenced block of a reply (of the language, if one is named so), else the reply as it is."""
    blocks = re.findall(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", reply, re.DOTALL)
    named = [code for name, code in blocks if name.lower() in (language, language[:2])]
    if named:
        return str(named[-1])
    return str(blocks[-1][1]) if blocks else reply


def pass_at_k(total: int, passed: int, k: int) -> float:
    """The unbiased chance that one of `k` programs, drawn from `total` of which `passed` passed, passes.

    1 - C(total - passed, k) / C(total, k); Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    if not 0 <= passed <= total or k < 1:
        raise ValueError(f"pass@{k} of {passed} out of {total}")
    if k > total:
        raise ValueError(f"pass@{k} needs at least {k} programs, there are {total}")
    if total - passed < k:
        return 1.0
    return 1.0 - math.comb(total - passed, k) / math.comb(total, k)
