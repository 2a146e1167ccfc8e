"""The public surface of `unbroken` is exactly its `__all__`, and stays what it was."""

from __future__ import annotations

import inspect
import subprocess
import sys

import unbroken


def test_all_is_the_surface() -> None:
    assert sorted(unbroken.__all__) == sorted(
        ["EXIT_STOPPED", "Checkpointer", "Run", "UnbrokenError", "__version__", "attach"]
    )


def test_nothing_else_is_there_without_an_underscore() -> None:
    """In a fresh interpreter: importing parts adds them as attributes, which is not what we offer."""
    code = "import unbroken, types; print(sorted(n for n, v in vars(unbroken).items() if not n.startswith('_') and not isinstance(v, types.ModuleType)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    extra = set(eval(shown)) - set(unbroken.__all__)
    assert extra <= {"TYPE_CHECKING", "annotations", "Any", "Exit"}, extra


def test_every_name_is_there_and_explained() -> None:
    for name in unbroken.__all__:
        value = getattr(unbroken, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    try:
        unbroken.Checkpointr  # noqa: B018
    except AttributeError as e:
        assert "Checkpointr" in str(e)
    else:
        raise AssertionError("no error")


def test_exit_code_of_a_rank_that_stopped_on_request() -> None:
    assert unbroken.EXIT_STOPPED == 75
