"""What a worker says of itself to who started it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from unbroken.errors import EvaluationError, ModelChanged
from unbroken.evaluate.contracts import ModelSpec
from unbroken.evaluate.engines.wire import Message, WorkerChannel
from unbroken.evaluate.engines.worker.connecting import connect
from unbroken.evaluate.engines.worker.loading import FilesInPlace
from unbroken.evaluate.engines.worker.process import Worker
from unbroken.evaluate.model.sources import FolderSource, hash_model
from unbroken.journal.codec import encode
from unbroken.testing.evaluation import BACKEND, fake_model


class Told:
    """A coordinator's side of the connection: what it sends, and what it was sent."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.sent: list[str] = []

    def send(self, op: str, **_: Any) -> None:
        self.sent.append(op)

    def receive(self) -> Message | None:
        return self.messages.pop(0) if self.messages else None

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "code", "end"),
    [
        ({}, 0, "ended after 0 blocks that it answered: every answer is here"),
        ({"broken": True}, 53, "ended after 0 blocks that it answered: the weights have the wrong shape"),
    ],
)
def test_it_says_what_it_joined_and_why_it_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: dict[str, bool], code: int, end: str
) -> None:
    model = fake_model(tmp_path / "m")
    files = [[f.name, f.size, f.stamp] for f in FolderSource(model).files()]
    given = {"cache": False, "address": str(model), "hash": "h", "files": files}
    spec = ModelSpec(str(model), BACKEND, options=options)
    told = Told(
        {"op": "welcome", "spec": encode(spec), "model": given, "beat_s": 60.0, "suite": "core"},
        {"op": "stop", "why": "every answer is here"},
    )
    worker = Worker(cast(WorkerChannel, told), "w7", (), warm=False)
    assert worker.serve("token", tmp_path) == code
    said = capfd.readouterr().err
    assert f"joined as w7: suite core, model m, folder {tmp_path}\n" in said
    assert end in said


def test_a_copy_of_the_model_elsewhere_will_do_and_another_model_in_its_place_will_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, copy = fake_model(tmp_path / "m"), fake_model(tmp_path / "copy")
    source = FolderSource(model)
    files = [[f.name, f.size, f.stamp] for f in source.files()]
    hashed = hash_model(source, tmp_path / "memo").hash
    halt = threading.Event()
    watched = FilesInPlace(FolderSource(copy), files, hashed, halt)
    watched.check()
    (copy / "model.safetensors").write_bytes(b"others!")  # as many bytes
    with pytest.raises(ModelChanged, match="were changed while"):
        watched.check()
    with pytest.raises(ModelChanged, match="not those that the evaluation began with"):
        FilesInPlace(FolderSource(copy), files, hashed, halt)
    watched = FilesInPlace(source, files, hashed, halt)
    for f in model.iterdir():
        f.unlink()
    watched.check()  # what is mapped stays


@pytest.mark.parametrize(
    "text",
    [
        "[]", "5", "null", '"x"', '{"address": 5}', '{"address": "tls:h:1"}', "{", "\udcff",
        '{"address": 5, "token": "t", "shared": "s", "identity": ""}',
        '{"address": "tls:h:1", "token": 1, "shared": 2, "identity": ""}',
        '{"address": "tls:127.0.0.1:99999", "token": "t", "shared": "s", "identity": ""}',
        '{"address": "tls:127.0.0.1:1", "token": "t", "shared": "s", "identity": "a key"}',
        '{"address": "tls:127.0.0.1:1", "token": "t", "shared": "s", "identity": ""}',
        '{"host": "127.0.0.1", "port": 1, "token": "t", "shared": "s"}',
    ],
)  # fmt: skip
def test_a_file_that_names_no_coordinator_is_waited_for_and_then_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text, errors="surrogateescape")
    (tmp_path / "cluster.json").chmod(0o600)
    with pytest.raises(
        EvaluationError,
        match=r"no coordinator answers: (the file|Expecting|'utf-8'|no address|.*certificate).*cluster\.json",
    ):
        connect(tmp_path / "cluster.json", within_s=0.15)


@pytest.mark.parametrize("how", [["-O"], ["-X", "pycache_prefix={tmp}"], []])
def test_bytecode_is_missed_only_where_compileall_would_bring_it(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "fresh.py").write_text("")
    code = "import fresh; from unbroken.evaluate.engines.worker.warming import count_uncompiled; print(count_uncompiled())"
    flags = [flag.format(tmp=tmp_path / "elsewhere") for flag in how]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    said = subprocess.check_output([sys.executable, "-B", *flags, "-c", code], env=env, text=True)
    assert (int(said) > 0) == (not how)
