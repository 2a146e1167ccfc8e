"""Benchmarks run rarely: what a rename can break in them without anybody noticing is found here."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/support/*.py"), *ROOT.glob("examples/**/*.py")]
)
NAMESPACE = set(dir(argparse.Namespace))


def options(tree: ast.AST) -> set[str]:
    """The attributes that the options of a script's parsers become."""
    found = set()
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr != "add_argument":
            continue
        names = [a.value for a in call.args if isinstance(a, ast.Constant)]
        given = [
            k.value.value for k in call.keywords if k.arg == "dest" and isinstance(k.value, ast.Constant)
        ]
        long = [n for n in names if n.startswith("--")] or names
        found |= {str(n).lstrip("-").replace("-", "_") for n in given or long[:1]}
    return found


def is_parsed(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "parse_args"
    )


def read(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, attribute) of each option that a function reads from what it has parsed, or was given as a Namespace."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {
            a.arg for a in function.args.args if a.annotation and "Namespace" in ast.unparse(a.annotation)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and is_parsed(node.value):
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in names
            ):
                yield node.lineno, node.attr


@pytest.mark.parametrize("folder", ["benchmarks", "tests/support", "examples"])
def test_each_option_that_a_script_reads_is_one_that_it_has(folder: str) -> None:
    trees = {p: ast.parse(p.read_text()) for p in SCRIPTS if p.is_relative_to(ROOT / folder)}
    everywhere = {
        o for tree in trees.values() for o in options(tree)
    }  # a script may hand its options to another
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in read(tree)
        if name not in (options(tree) or everywhere) | NAMESPACE
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("script", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda p: p.stem)
def test_what_a_benchmark_loops_over_it_does_not_write_to_meanwhile(script: Path) -> None:
    """A rename once gave the contenders and their results one name: the loop was over the results, which were none."""
    for loop in ast.walk(ast.parse(script.read_text())):
        if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
            continue
        over = {n.id for n in ast.walk(loop.iter) if isinstance(n, ast.Name)}
        written = {
            target.value.id
            for node in ast.walk(loop)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)
        }
        if isinstance(loop.iter.func, ast.Attribute) and loop.iter.func.attr in ("items", "values", "keys"):
            assert not over & written, f"line {loop.lineno}: {over & written}"
