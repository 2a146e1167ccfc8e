"""What we export, transformers itself loads: the same logits; and what it saved, we adopt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unbroken.checkpoint.capture import direct
from unbroken.checkpoint.convert import export
from unbroken.checkpoint.convert import imports as adopt
from unbroken.checkpoint.restore import reshard
from unbroken.checkpoint.storage.posix import PosixStorage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("shard", [30_000, 10**9])
def test_a_llama_there_and_back(tmp_path: Path, tie: bool, shard: int) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (requirements/all.txt)"
    )
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tie,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    storage = PosixStorage(tmp_path / "ours")
    state = {"model": model.state_dict(), "step": 9}
    name = direct.commit(storage, [direct.write_rank(storage, state, direct.Stamp("r", 1, 9))]).name
    config.save_pretrained(tmp_path / "config")
    done = export.to_huggingface(
        storage, name, tmp_path / "hf", max_shard_bytes=shard, beside=tmp_path / "config"
    )
    assert any("tied" in n for n in done.notes) == tie
    assert ("model.safetensors.index.json" in done.files) == (shard < 10**6)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)

    loaded.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    new = PosixStorage(tmp_path / "adopted")
    again = adopt.import_checkpoint(tmp_path / "theirs", new, step=0).name
    fresh = transformers.LlamaForCausalLM(config)
    target = {"model": {n: t for n, t in fresh.state_dict().items() if not (tie and n == "lm_head.weight")}}
    reshard.load(new, again, target)
    fresh.load_state_dict(target["model"], strict=not tie)
    with torch.no_grad():
        assert torch.equal(fresh.eval()(tokens).logits, model(tokens).logits)
