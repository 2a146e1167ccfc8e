"""What docstrings and comments name exists: each name between backticks is one of its file's code, or defined somewhere."""

from __future__ import annotations

import ast
import asyncio
import builtins
import itertools
import keyword
import os
import re
import socket
import ssl
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "unbroken"
TEXT = re.compile(r'^[ \t]*[rR]?""".*?"""|#[^\n]*', re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"(?<![`\w])`([A-Za-z_][\w.]*)(?:\([^`]*\))?`(?!`)")
DEFINED = re.compile(r"""\b(?:def|class|import|as)\s+(\w+)|\b(\w+)\s*(?::|=(?!=))|["'](\w+)["']""")
OF_OTHERS = {
    "unbroken",  # the command
    "setproctitle", "Py_buffer", "squeue", "sacct", "ps", "localflock", "urlopen", "collate_fn",  # programs, options, functions
    "hf", "vllm", "sglang", "sys_total_power",  # names that others give to their models and columns
    "admin_password", "tokenizer_secret", "hunter22",  # examples of what is a secret, and what is none
    "Typer", "Schema", "request",
    "TOKEN",  # stands for a part of a file name
    "_utc", "_s", "_gib", "_pct", "_w",  # ends of column names
}  # fmt: skip

SHARED = {
    "Request": "the word of two contracts that others write against: what is asked of a cluster, and of a model",
}
"""Class names that stand for two things, and why."""


def named_in(text: str) -> list[tuple[int, str]]:
    """(line, name) of what a file's docstrings and comments put between backticks."""
    return [
        (text.count("\n", 0, found.start() + name.start()) + 1, name[1])
        for found in TEXT.finditer(text)
        for name in NAMED.finditer(found[0])
    ]


def defined(code: str) -> set[str]:
    """What code gives a name to: functions, classes, imports, arguments, fields, keywords, keys, words between quotes."""
    return {a or b or c for a, b, c in DEFINED.findall(code)}


def test_what_is_named_exists() -> None:
    texts = {p: p.read_text() for p in sorted(ROOT.rglob("*.py"))}
    codes = {p: TEXT.sub("", t) for p, t in texts.items()}
    known = {n for module in (builtins, asyncio, itertools, os, socket, ssl, subprocess) for n in dir(module)}
    known |= {*keyword.kwlist, *sys.stdlib_module_names, *OF_OTHERS}
    known.update(*(p.relative_to(ROOT).with_suffix("").parts for p in texts))
    for code in codes.values():
        known |= defined(code)
    wrong = []
    for path, text in texts.items():
        for line, name in named_in(text):
            for n in name.strip(".").split("."):
                if n not in known and not re.search(rf"\b{n}\b", codes[path]):
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: `{name}`")
    assert not wrong, "\n".join(wrong)


def test_a_name_of_nothing_would_be_found() -> None:
    text = '"""Waits `linger` seconds for `what`."""\nfor what in ():  # not `gone.at`\n    pass\n'
    assert named_in(text) == [(1, "linger"), (1, "what"), (2, "gone.at")]
    assert defined("def a(b: int = 1): c = d == 'e'") == {"a", "b", "int", "c", "e"}


def test_the_types_of_a_snapshot_are_those_that_are_drawn() -> None:
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
    drawn = page.partition("## A snapshot, stage by stage")[2].partition("## ")[0]
    named = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)*\b", drawn.partition("```")[2])) - {"JSON"}
    code = "\n".join(
        p.read_text() for folder in ("checkpoint", "progress/records") for p in (ROOT / folder).rglob("*.py")
    )
    gone = [n for n in named if not re.search(rf"^(?:class {n}\b|{n} = )", code, re.MULTILINE)]
    assert len(named) > 12 and not gone


def test_a_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 500
    assert {name: at for name, at in places.items() if len(at) > 1 and name not in SHARED} == {}
    assert all(len(places[name]) > 1 for name in SHARED), "what is no longer shared needs no reason"
