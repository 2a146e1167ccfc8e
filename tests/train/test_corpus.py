"""Conversations, preferences and other tools' token files: what is learnt of them, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unbroken.errors import InputError, UsageError
from unbroken.train.config import ModelConfig, parse
from unbroken.train.corpus.chat import open_conversations, open_preferences, render
from unbroken.train.corpus.samples import IGNORED, TextSamples, text_samples
from unbroken.train.corpus.token_files import open_token_file
from unbroken.train.huggingface.names import description
from unbroken.train.planning.sizes import parameter_shapes
from unbroken.train.training import open_corpus


def conversation(question: str, answer: str) -> str:
    return json.dumps(
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    )


def test_only_answers_are_learnt_and_none_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(conversation(f"{i}?", f"<{i}>" * 3) for i in range(12)) + "\n\n")
    found = open_conversations(file, 100)
    tokens, targets = found.samples.rows(range(found.samples.count))
    assert tokens.shape == targets.shape == (found.samples.count, 100) and found.samples.count < 12
    text = b"".join(bytes(row.astype(np.uint8)) for row in tokens)
    assert all(f"assistant: <{i}>".encode() in text for i in range(12))
    learnt = bytes(targets[targets != IGNORED].astype(np.uint8))
    assert learnt == b"".join(f"<{i}>".encode() * 3 + b"\0" for i in range(12))
    # Each target is the token that follows.
    at = targets[:, :-1] != IGNORED
    assert (targets[:, :-1][at] == tokens[:, 1:][at]).all()
    assert found.samples.weight([0, 1]) == int((targets[:2] != IGNORED).sum())
    assert open_conversations(file, 100).fingerprint == found.fingerprint
    file.write_text(file.read_text().replace("<3>", "<4>", 1))
    assert open_conversations(file, 100).fingerprint != found.fingerprint
    assert render([{"role": "user", "content": "a?"}]) == b"user: a?\nassistant: "


def test_a_preference_is_two_rows_of_one_prompt(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "2+2?", "chosen": "4", "rejected": "five"}) + "\n")
    samples = open_preferences(file, 40).samples
    assert samples.count == 1 and samples.weight([0]) == 1
    _, (chosen, rejected) = samples.rows([0])
    assert bytes(chosen[chosen != IGNORED].astype(np.uint8)) == b"4\0"
    assert bytes(rejected[rejected != IGNORED].astype(np.uint8)) == b"five\0"


@pytest.mark.slow
def test_a_tokenizer_and_its_template_are_used_and_its_vocabulary_is_compared(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    said = description(ModelConfig(), 100)
    assert said is not None
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, content in said["files"].items():  # the 256 bytes, as a tokenizer of Hugging Face
        (folder / name).write_text(json.dumps(content))
    chat, pairs = tmp_path / "chat.jsonl", tmp_path / "pairs.jsonl"
    chat.write_text("\n".join(conversation(f"{i}?", f"<{i}>") for i in range(5)))
    pairs.write_text(json.dumps({"prompt": "2+2?", "chosen": "4", "rejected": "five"}))
    for opened, file in ((open_conversations, chat), (open_preferences, pairs)):
        plain, theirs = (opened(file, 60, t).samples for t in ("bytes", str(folder)))
        assert (plain.tokens == theirs.tokens).all() and (plain.targets == theirs.targets).all()
    with pytest.raises(InputError, match="vocabulary of 64"):
        open_conversations(chat, 60, str(folder), 64)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    start = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    config["chat_template"] = start + "{% if add_generation_prompt %}[assistant]{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    samples = open_conversations(chat, 60, str(folder)).samples
    text = b"".join(bytes(row.astype(np.uint8)) for row in samples.tokens)
    assert b"[user]0?;[assistant]<0>;[user]1?;" in text and b"user: " not in text
    learnt = bytes(samples.targets[samples.targets != IGNORED].astype(np.uint8))
    assert learnt == b"".join(f"<{i}>;".encode() for i in range(5))


@pytest.mark.parametrize(
    ("line", "seq", "why"),
    [
        ("[1]", 40, "no JSON object"),
        ('{"messages": [{"role": "user", "content": "a"}]}', 40, "no conversation with an answer"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', 40, "no conversation with an answer"),
        (conversation("a", "b" * 60), 40, "at least"),
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path: Path, line: str, seq: int, why: str) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(conversation("a", "b") + "\n" + line + "\n")
    with pytest.raises(InputError) as e:
        open_conversations(file, seq)
    assert why in str(e.value)


def test_no_preference_without_both_answers(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "2+2?", "chosen": "4"}) + "\n")
    with pytest.raises(InputError, match="line 1"):
        open_preferences(file, 40)


def megatron(path: Path, documents: list[list[int]], dtype: str = "uint16", code: int = 8) -> None:
    """A .bin and .idx as Megatron-LM's IndexedDatasetBuilder lays them out."""
    lengths = np.array([len(d) for d in documents], np.int32)
    size = np.dtype(dtype).itemsize
    pointers = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64) * size)).astype(np.int64)
    ends = np.arange(len(documents) + 1, dtype=np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(ends))
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + ends.tobytes())
    path.with_suffix(".bin").write_bytes(np.array([t for d in documents for t in d], dtype).tobytes())


def test_token_files_of_megatron_and_datatrove(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [400, 5], [6]]
    megatron(tmp_path / "a.bin", documents)
    found = open_token_file(str(tmp_path / "a.idx"), 512, tmp_path / "cache")
    assert found.map().tolist() == [1, 2, 3, 400, 5, 6]
    again = open_token_file(str(tmp_path / "a.bin"), 512, tmp_path / "cache")
    assert (again.path, again.fingerprint, again.count) == (found.path, found.fingerprint, 6)
    tokens, targets = TextSamples(found.map(), 2).rows([0, 1])
    assert tokens.tolist() == [[1, 2], [3, 400]] and targets.tolist() == [[2, 3], [400, 5]]
    np.array([t for d in documents for t in d], np.uint32).tofile(tmp_path / "b.ds")
    np.array([3, 5, 6], np.uint64).tofile(tmp_path / "b.ds.index")
    other = open_token_file(str(tmp_path / "b.ds"), 512, tmp_path / "cache")
    assert (other.dtype, other.map().tolist()) == ("uint32", found.map().tolist())
    config = parse(["--data", str(tmp_path / "b.ds"), "--vocab", "512", "--cache", str(tmp_path / "cache")])
    assert open_corpus(config) == other


def test_token_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    megatron(tmp_path / "a.bin", [[1, 2, 3], [400]])
    with pytest.raises(InputError, match="another tokenizer") as e:
        open_token_file(str(tmp_path / "a.bin"), 256, tmp_path)
    assert "--vocab 401" in (e.value.hint or "")
    with open(tmp_path / "a.bin", "ab") as f:
        f.write(b"\0\0")
    with pytest.raises(InputError, match="index tells of 4 tokens"):
        open_token_file(str(tmp_path / "a.bin"), 512, tmp_path)
    (tmp_path / "a.idx").write_bytes(b"something else")
    with pytest.raises(InputError, match="no index of Megatron"):
        open_token_file(str(tmp_path / "a.bin"), 512, tmp_path)
    (tmp_path / "a.idx").unlink()
    with pytest.raises(InputError, match="index beside"):
        open_token_file(str(tmp_path / "a.bin"), 512, tmp_path)


def test_other_tasks_are_of_the_trainer_of_plans() -> None:
    config = parse(["--task", "sft"])
    assert config.wants_plan and config.identity("x")["data"]["task"] == "sft"
    assert "task" not in parse([]).identity("x")["data"], "checkpoints of before have none"
    with pytest.raises(UsageError, match="task"):
        parse(["--task", "chat"])


def test_the_hugging_face_form_names_every_tensor_once() -> None:
    c = ModelConfig()
    said = description(c, 64)
    assert said is not None
    assert set(said["names"]) == set(parameter_shapes(c)) and len(set(said["names"].values())) == len(
        said["names"]
    )
    assert said["files"]["config.json"]["num_key_value_heads"] == c.kv_heads
    vocabulary = said["files"]["tokenizer.json"]["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256)) and vocabulary["a"] == ord("a")
    assert description(ModelConfig(experts=4), 64) is None


def test_datatrove_s_loss_mask_is_kept_also_in_a_mixture(tmp_path: Path) -> None:
    tokens, learnt = np.arange(13, dtype=np.uint16), np.arange(13) % 3 != 0
    tokens.tofile(tmp_path / "a.ds")
    np.array([5, 13], np.uint64).tofile(tmp_path / "a.ds.index")
    every = open_token_file(str(tmp_path / "a.ds"), 64, tmp_path / "c")
    learnt.tofile(tmp_path / "a.ds.loss")
    for source in ("a.ds", "1*a.ds"):
        config = parse(
            [
                "--seq",
                "4",
                "--vocab",
                "256",
                "--cache",
                str(tmp_path / "c"),
                "--data",
                source.replace("a.ds", str(tmp_path / "a.ds")),
            ]
        )
        found: Any = open_corpus(config)
        samples = found.samples if source != "a.ds" else text_samples(found, 4)
        inputs, targets = samples.rows([0, 2])
        assert inputs.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
        assert targets.tolist() == [[1, 2, IGNORED, 4], [IGNORED, 10, 11, IGNORED]]
        assert samples.weight([0, 2]) == 5
        assert found.fingerprint != every.fingerprint
    learnt[:-1].tofile(tmp_path / "a.ds.loss")
    with pytest.raises(InputError, match="12 bytes for 13 tokens"):
        open_token_file(str(tmp_path / "a.ds"), 64, tmp_path / "c")
