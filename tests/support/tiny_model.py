"""A real, very small language model in a folder: random weights, a tokenizer of its own, a chat template.

Nothing is downloaded. It knows nothing; it is for tests and demonstrations of loading, batching and determinism.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_tasks import WORDS

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tiny_model(
    folder: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    context: int = 256,
    seed: int = 0,
    dtype: str = "float32",
) -> Path:
    """Writes a Llama-style model of about 200,000 parameters (with the defaults) and returns its folder.

    The same arguments give the same weights with the same version of torch. Needs torch, transformers, tokenizers.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(unk_token=None))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = " ".join(WORDS)
    raw.train_from_iterator(
        [f"{text} Which word fits: ? Answer: 1 + 2 = 3 user assistant system"] * 4, trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", model_max_length=context, chat_template=CHAT
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(8.0)  # the usual start is so small that every token is as likely as any other
    model.save_pretrained(folder)
    torch.random.set_rng_state(generator)
    return folder
