"""What `unbroken train` writes is a model that transformers loads, with the same loss, and generates with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer, Training

pytestmark = [pytest.mark.slow, pytest.mark.integration]


def test_an_exported_checkpoint_is_the_same_model(tmp_path: Path, fork_server: ForkServer) -> None:
    transformers = pytest.importorskip("transformers")
    import torch
    from safetensors.torch import load_file

    from unbroken.checkpoint.convert.export import to_huggingface
    from unbroken.checkpoint.storage import open_storage
    from unbroken.train.config import ModelConfig
    from unbroken.train.huggingface.names import description
    from unbroken.train.model import Decoder

    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog, " * 400)
    t = Training(fork_server, tmp_path / "t", 1, ["--data", str(tmp_path / "text"), "--cache", str(tmp_path / "c"),
                 "--steps", "8", "--checkpoints", str(tmp_path / "k")])  # fmt: skip
    t.start()
    t.finish()
    (name,) = [p.name for p in (tmp_path / "k").iterdir() if p.name.startswith("step-")]
    to_huggingface(open_storage(str(tmp_path / "k")), name, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the quick \u00e9 fox \U0001f98a jumps over\0"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert bytes(ids[0].tolist()) == text.encode() and tokenizer.decode(ids[0]) == text
    ours = Decoder(ModelConfig(), 64, 0)
    said, stored = description(ModelConfig(), 64), load_file(tmp_path / "hf" / "model.safetensors")
    assert said is not None
    ours.load_state_dict({o: stored[t] for o, t in said["names"].items()}, strict=True)
    with torch.no_grad():
        loss = ours(ids[:, :-1], ids[:, 1:])
        logits = theirs(ids[:, :-1]).logits[0].float()
    assert torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item() == pytest.approx(
        loss.item(), rel=1e-5
    )
    assert len(theirs.generate(ids, max_new_tokens=5, do_sample=False)[0]) <= ids.shape[1] + 5
