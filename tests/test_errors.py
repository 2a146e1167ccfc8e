"""The exception tree: its drawing is the code, every code is said once, every message is one paragraph."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from unbroken import errors
from unbroken.errors import Exit, MissingExtra, UnbrokenError, UnknownKey, UnknownTask, UnsaveableState
from unbroken.extras import install_command

_LINE = re.compile(r"^    ((?:[│ ]   )*)(?:[├└]── )?(\w+)\s+(\d+)   \S")


def drawn() -> dict[str, tuple[str | None, int]]:
    """name -> (parent, exit code) as the docstring draws it."""
    found: dict[str, tuple[str | None, int]] = {}
    path: list[str] = []
    for line in inspect.getdoc(errors).__str__().splitlines():
        m = _LINE.match("    " + line.removeprefix("    ")) if line.strip() else None
        if m is None:
            continue
        depth = (line.index(m[2]) - 4) // 4 if line.startswith("    ") else 0
        path[depth:] = [m[2]]
        found[m[2]] = (path[depth - 1] if depth else None, int(m[3]))
    return found


def classes() -> dict[str, type[UnbrokenError]]:
    return {
        n: c
        for n, c in vars(errors).items()
        if inspect.isclass(c) and issubclass(c, UnbrokenError) and c.__module__ == errors.__name__
    }


def test_the_drawn_tree_is_the_tree() -> None:
    real = {
        n: (None if c is UnbrokenError else c.__bases__[0].__name__, c.exit_code)
        for n, c in classes().items()
    }
    assert drawn() == real


def test_every_class_has_a_meaning_and_a_code() -> None:
    for name, c in classes().items():
        assert inspect.getdoc(c), name
        assert 0 < c.exit_code < 126, "codes from 126 on belong to the shell"


def test_codes_are_distinct_apart_from_families() -> None:
    """A child may share its parent's code only where it is that family's general case."""
    by_code: dict[int, set[str]] = {}
    for name, c in classes().items():
        by_code.setdefault(c.exit_code, set()).add(name)
    shared = {code: names for code, names in by_code.items() if len(names) > 1}
    assert shared == {
        2: {"UsageError", "UnknownKey"},
        10: {"RunError", "RunStopped"},
        30: {"CheckpointError", "NoCheckpoint"},
    }
    answers = {v for k, v in vars(Exit).items() if k.isupper() and v}
    assert answers & set(by_code) == {errors.CheckpointCorrupt.exit_code}


def test_one_paragraph() -> None:
    e = UnbrokenError("it broke.", where="rank 3", hint="Fix it.")
    assert str(e) == "it broke (rank 3). Fix it."
    assert str(UnbrokenError("it broke")) == "it broke."
    assert json.loads(json.dumps(e.as_json())) == {
        "error": {
            "kind": "UnbrokenError",
            "what": "it broke.",
            "where": "rank 3",
            "todo": "Fix it.",
            "exit_code": 1,
        }
    }


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (UnknownKey("spare", ["spares", "nodes"]), "unknown key 'spare'. Did you mean 'spares'?"),
        (UnknownKey("f1-marco", ["f1-macro"], what="metric"), "unknown metric 'f1-marco'. Did you mean 'f1-macro'?"),
        (UnknownKey("zzz", ["b", "a"]), "unknown key 'zzz'. Known: a, b."),
        (MissingExtra("duckdb", "trace", what="unbroken trace"), f"unbroken trace needs duckdb, which is not installed. Install it with: {install_command('trace')}."),
        (UnsaveableState("model.x", "it is a lambda"), "state 'model.x' cannot be saved: it is a lambda."),
        (UnknownTask("mmul", ["mmlu", "arc"]), "there is no task 'mmul'. Did you mean 'mmlu'?"),
        (UnknownTask("x", []), "there is no task 'x'."),
    ],
)  # fmt: skip
def test_errors_that_build_their_own_words(error: UnbrokenError, says: str) -> None:
    # A question keeps its mark: "?." is no sentence.
    assert str(error).replace("?.", "?") == says
