"""Text becomes one token file: whole, the same whoever makes it, going on where it stopped, each document once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from unbroken.errors import InputError, UsageError
from unbroken.train.corpus import tokenize as part
from unbroken.train.corpus.token_files import open_token_file
from unbroken.train.corpus.tokenize import find_inputs, main, make_part, open_tokenizer, tokenize


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("two", "one", "three")))
    (folder / "c.txt").write_bytes(b"\xff\xfe no text of UTF-8")
    return folder


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are made in this process: starting others takes seconds."""

    class Pool:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, f: object, *args: object) -> object:
            from concurrent.futures import Future

            done: Future[object] = Future()
            try:
                done.set_result(f(*args))  # type: ignore[operator]
            except Exception as e:  # noqa: BLE001  as a pool keeps it
                done.set_exception(e)
            return done

        def shutdown(self, **_: object) -> None: ...

    monkeypatch.setattr(part, "ProcessPoolExecutor", Pool)


def made(text: Path, out: Path, **more: object) -> tuple[dict[str, object], bytes]:
    options = {"tokenizer": "bytes", "field": "text", "workers": 2, "deduplicate": False} | more
    said = tokenize(find_inputs(str(text), "train"), out, **options)  # type: ignore[arg-type]
    return said, (out / "tokens.ds").read_bytes()


def test_documents_follow_each_other_and_the_trainer_reads_them(text: Path, tmp_path: Path) -> None:
    said, raw = made(text, tmp_path / "out")
    tokens = np.frombuffer(raw, np.uint16).astype(np.uint8).tobytes()
    assert tokens == b"one\0two\0one\0three\0\xff\xfe no text of UTF-8\0"
    assert (said["documents"], said["duplicates"], said["tokens"]) == (5, 0, len(tokens))
    opened = open_token_file(str(tmp_path / "out" / "tokens.ds"), 256, tmp_path / "cache")
    assert opened.count == len(tokens) and opened.fingerprint == said["sha256"]


def test_a_document_that_came_before_is_left_out(text: Path, tmp_path: Path) -> None:
    said, raw = made(text, tmp_path / "out", deduplicate=True)
    assert (
        said["duplicates"] == 1
        and np.frombuffer(raw, np.uint16)[:8].astype(np.uint8).tobytes() == b"one\0two\0"
    )


def test_it_goes_on_where_it_stopped(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(text, tmp_path / "whole")
    calls: list[str] = []

    def once(i: part.TokenizeInput, *args: object) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(i.source)
        make_part(i, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(part, "make_part", once)
    with pytest.raises(KeyboardInterrupt):
        made(text, tmp_path / "out")
    assert not (tmp_path / "out" / "tokens.ds").exists()
    again: list[str] = []
    monkeypatch.setattr(part, "make_part", lambda i, *a: (again.append(i.source), make_part(i, *a)))
    assert made(text, tmp_path / "out") == whole
    assert len(again) == 2 and calls[0] not in again
    (text / "a.txt").write_text("changed")
    again.clear()
    assert made(text, tmp_path / "out")[1] != whole[1]
    assert [Path(x).name for x in again] == ["a.txt"]


def test_what_cannot_be_read_is_named(text: Path, tmp_path: Path) -> None:
    (text / "d.jsonl").write_text('{"text": "good"}\n{"body": "no"}\n')
    with pytest.raises(InputError, match=r"d\.jsonl, line 2") as e:
        made(text, tmp_path / "out")
    assert "body" in (e.value.hint or "")
    with pytest.raises(InputError, match="no text"):
        find_inputs(str(tmp_path / "nothing"), "train")
    with pytest.raises(UsageError, match="above 0"):
        main([str(text), "--out", str(tmp_path / "out"), "--workers", "0"])


@pytest.mark.slow
def test_a_tokenizer_and_a_dataset_of_hugging_face(tmp_path: Path) -> None:
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    from unbroken.train.config import ModelConfig
    from unbroken.train.huggingface.names import description

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, value in (description(ModelConfig(), 64) or {})["files"].items():
        (folder / name).write_text(json.dumps(value))
    encode, vocab = open_tokenizer(str(folder))
    assert vocab == 256 and list(encode("ab")) == [97, 98, 0]
    datasets.Dataset.from_dict({"text": ["ab", "c"]}).save_to_disk(str(tmp_path / "set"))
    inputs = find_inputs(f"dataset:{tmp_path / 'set'}", "train")
    tokenize(inputs, tmp_path / "out", str(folder), "text", 1, False)
    assert np.fromfile(tmp_path / "out" / "tokens.ds", np.uint16).tolist() == [97, 98, 0, 99, 0]
    with pytest.raises(InputError, match="no tokenizer"):
        open_tokenizer(str(tmp_path / "none"))
    assert transformers
