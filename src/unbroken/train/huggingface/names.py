"""A model of ours in Hugging Face's words: configuration, names of tensors, tokenizer. Data alone; needs no library.

The dense model is a Llama there. A checkpoint carries this, so that whoever exports or evaluates it need not know the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig

_BLOCK: Mapping[str, str] = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_ENDS: Mapping[str, str] = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def description(c: ModelConfig, seq: int) -> dict[str, Any] | None:
    """{"names": ours -> theirs, "files": what lies beside the weights}; None for a mixture of experts, which is none of theirs."""
    if c.experts:
        return None
    names = dict(_ENDS)
    for i in range(c.layers):
        names |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in _BLOCK.items()}
    files: dict[str, Any] = {"config.json": _config(c, seq)}
    if c.vocab == 256:
        files |= _byte_tokenizer(seq)
    return {"names": names, "files": files}


def _config(c: ModelConfig, seq: int) -> dict[str, Any]:
    # In a byte-level text a zero ends each document.
    ends = {"bos_token_id": None, "eos_token_id": 0 if c.vocab == 256 else None, "pad_token_id": None}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.dim,
        "intermediate_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.dim // c.heads,
        "vocab_size": c.vocab,
        "max_position_embeddings": seq,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **ends,
    }


def _byte_tokenizer(seq: int) -> dict[str, Any]:
    """A tokenizer whose tokens are the 256 bytes, each under its own number."""
    vocab = {character: byte for byte, character in enumerate(_characters())}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = _characters()[0]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": seq,
            "eos_token": end,
            "clean_up_tokenization_spaces": False,
        },
    }  # fmt: skip


def _characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table): printable ones for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]
