"""The keeper starts wherever the trainer could import us: from sys.path alone, from a relative entry, from elsewhere."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

import unbroken
from unbroken import Checkpointer
from unbroken.checkpoint.client import discovery
from unbroken.checkpoint.client.discovery import supervised_keeper
from unbroken.checkpoint.client.links import KeeperGone
from unbroken.checkpoint.ranks.environment import Place
from unbroken.errors import UsageError
from unbroken.machine import python_path

SCRIPT = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
import torch, unbroken
c = unbroken.Checkpointer("c", snapshot_every=1, persist_every=1, memory="64MiB")
c.save(1, {"w": torch.ones(2)}, persist=True)
c.close()
"""


@pytest.mark.parametrize("how", ["absolute", pytest.param("relative", marks=pytest.mark.slow)])
def test_the_keeper_starts_from_sys_path_alone(own_keepers: Path, tmp_path: Path, how: str) -> None:
    source, libraries = str(Path(unbroken.__file__).parents[1]), sysconfig.get_path("purelib")
    if how == "relative":
        source, libraries = os.path.relpath(source, tmp_path), os.path.relpath(libraries, tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "train.py", os.pathsep.join([source, libraries])], cwd=tmp_path, env=env,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c" / "step-00000001.a0001" / "COMMITTED").exists()


def test_every_entry_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "lib", "/x", "lib"])
    entries = python_path().split(os.pathsep)
    assert entries == [str(Path(unbroken.__file__).resolve().parents[1]), str(tmp_path / "lib"), "/x"]


@pytest.mark.parametrize("setting", ["UNBROKEN_SCRATCH", "XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_socket_path_that_is_too_long_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    for name in ("UNBROKEN_SCRATCH", "XDG_RUNTIME_DIR", "UNBROKEN_KEEPER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(setting, str(tmp_path / ("x" * 90)))
    monkeypatch.setattr(tempfile, "tempdir", None if setting != "TMPDIR" else str(tmp_path / ("x" * 90)))
    began = time.monotonic()
    with pytest.raises(UsageError, match="path of the keeper's socket has") as e:
        Checkpointer(tmp_path / "checkpoints").restore({"step": 1})
    assert time.monotonic() - began < 5
    assert f"Set {setting} to a shorter folder" in str(e.value.hint)


def test_the_keeper_of_a_busy_agent_is_waited_for_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that gave up after a minute had ended its attempt, and the next one met the same load."""
    now, comes_at = [0.0], [200.0]

    def link(*_: object, **__: object) -> str:
        if now[0] < comes_at[0]:
            raise KeeperGone("there is none yet")
        return "linked"

    monkeypatch.setattr(discovery, "RankLink", link)
    monkeypatch.setattr(discovery.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(discovery.time, "sleep", lambda s: now.__setitem__(0, now[0] + 20 * s))
    here = Place(0, 1, 0, "n", "r", 1, Path("/none"), None)
    assert supervised_keeper(here, {})(lambda _: None, lambda: None) == "linked"
    said = [r.getMessage() for r in caplog.records if "waiting for the keeper" in r.getMessage()]
    assert len(said) == 6 and "there is none yet" in said[0]
    comes_at[0] = math.inf
    with pytest.raises(KeeperGone):
        supervised_keeper(here, {})(lambda _: None, lambda: None)
