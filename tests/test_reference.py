"""The pages say what is there: every exit code, every environment variable, example files, nothing else."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken import errors
from unbroken.errors import Exit, UnbrokenError

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "unbroken"
EXIT_CODES = ROOT / "docs" / "reference" / "exit-codes.md"
ENVIRONMENT = ROOT / "docs" / "reference" / "environment.md"

_FAMILIES = (
    r"(?:UNBROKEN|XDG|HF|NCCL|CUDA|CUBLAS|TORCH|TORCHELASTIC|MASTER|AWS|OPENAI|SLURM|SLURMD|RAY|NLTK|GLOO|PYTHON|PYTORCH)"
    r"_[A-Z0-9_]+|[A-Z]+_(?:NUM|MAX)_THREADS|(?:GROUP|LOCAL|ROLE)_[A-Z_]+|TOKENIZERS_PARALLELISM|TQDM_DISABLE|DISABLE_MULTIPROC"
    r"|PYTHON[A-Z]+|RANK|WORLD_SIZE|HOME|PATH"
)
NOT_VARIABLES = {"CUBLAS_STATUS"}
"""Texts that look like a variable of such a family and are none: what logs print."""
NAMED_IN_PROSE = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "UNBROKEN_DATA",
    "UNBROKEN_FUZZ_TIMES",
    "UNBROKEN_TEST_HOME",
}
"""Read by a library (the names stand in a message) or by the tests."""


@functools.cache
def in_code() -> dict[str, set[str]]:
    """variable -> files of the package that name it, as a text of its own or as a keyword of an environment."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            elif isinstance(node, ast.Call):
                names = [k.arg for k in node.keywords if k.arg]
            for name in names:
                if re.fullmatch(_FAMILIES, name) and name not in NOT_VARIABLES:
                    found.setdefault(name, set()).add(str(path.relative_to(SOURCE)))
    return found


def on_page() -> set[str]:
    rows = [line for line in ENVIRONMENT.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([A-Z][A-Z0-9_]+)`", row.split("|")[1])}


def test_every_environment_variable_is_on_its_page() -> None:
    missing = {n: sorted(f) for n, f in in_code().items() if n not in on_page()}
    assert not missing, f"name these in {ENVIRONMENT.relative_to(ROOT)}: {missing}"


def test_the_page_names_no_variable_that_nobody_knows() -> None:
    assert on_page() - set(in_code()) - NAMED_IN_PROSE == set()


def test_no_setting_travels_between_our_parts_in_a_variable_that_only_one_of_them_knows() -> None:
    """UNBROKEN_* that are set are read somewhere, and the other way round, or a user sets them."""
    ours = {n for n in on_page() if n.startswith("UNBROKEN_")}
    assert ours >= {n for n in in_code() if n.startswith("UNBROKEN_")}


def test_example_files_that_the_docs_name_are_there() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = {(p.name, m) for p in pages for m in re.findall(r"`(examples/[\w./-]+)`", p.read_text())}
    assert named
    assert [n for n in sorted(named) if not (ROOT / n[1]).exists()] == []


def exit_rows() -> list[tuple[int, str]]:
    return [
        (int(m[1]), m[2])
        for line in EXIT_CODES.read_text().splitlines()
        if (m := re.match(r"\| (\d+) \| `(\w+)` \|", line))
    ]


def test_exit_codes_are_those_of_the_code() -> None:
    real = {
        (c.exit_code, n)
        for n, c in vars(errors).items()
        if inspect.isclass(c)
        and issubclass(c, UnbrokenError)
        and c.__module__ == errors.__name__
        and n == c.__name__  # a former name is an alias
    }
    real |= {(v, k) for k, v in vars(Exit).items() if k.isupper()}
    rows = exit_rows()
    assert len(rows) == len(set(rows))
    assert set(rows) == real


@pytest.mark.parametrize("path", [EXIT_CODES, ENVIRONMENT])
def test_every_row_is_whole(path: Path) -> None:
    for line in path.read_text().splitlines():
        if line.startswith("| "):
            cells = [c.strip() for c in line.strip("|").split("|")]
            assert all(cells), line


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+)", (ROOT / "README.md").read_text()))
    there = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert linked == there


def test_what_the_pages_say_to_run_for_a_small_model_makes_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    page = (ROOT / "docs" / "evaluation.md").read_text()
    (code,) = re.findall(r'python -c "(.*write_tiny_model.*)"', page)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # the page's commands are run in a checkout
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True, timeout=120
    )
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (tmp_path / "tiny").iterdir()
    }
