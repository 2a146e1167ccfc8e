"""A hook whose framework is not installed, or too old, names what to install; nothing of the framework is imported for it."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata, util

import pytest

from unbroken.errors import MissingExtra, UsageError
from unbroken.extras import install_command, requirements

HOOKS = ["transformers", "accelerate", "lightning", "torchft", "torchtitan", "deepspeed", "megatron"]


def load(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports a hook once more; what another test imported comes back afterwards."""
    import unbroken.hooks

    monkeypatch.delitem(sys.modules, f"unbroken.hooks.{hook}", raising=False)
    monkeypatch.delattr(unbroken.hooks, hook, raising=False)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(f"unbroken.hooks.{hook}")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_missing_framework_names_its_extra(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra) as missing:
        load(hook, monkeypatch)
    assert requirements(f"hooks-{hook}"), "pyproject.toml has this extra"
    assert install_command(f"hooks-{hook}") in str(missing.value.hint)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_framework_that_is_too_old_names_its_extra(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.9")
    if hook == "lightning":
        monkeypatch.setattr(util, "find_spec", lambda name: name)
    with pytest.raises(UsageError, match=rf"{hook}\S* 0\.0\.9 is too old for its hook") as old:
        load(hook, monkeypatch)
    assert install_command(f"hooks-{hook}") in str(old.value.hint)
