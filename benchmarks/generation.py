"""What the fast way gives on one device: texts, likelihoods, and a five-shot task, against the harness's own batches of eight.

    python benchmarks/generation.py                       # on a CPU, a tiny model, a minute
    python benchmarks/generation.py --dtype bfloat16 --parts texts --prompts 128       # where texts in 16 bits part, and why
    python benchmarks/generation.py --gpu                 # one H200: a Llama of 5.9 B random weights in bfloat16, 256 prompts

The targets on one H200: texts at 10 x static batches of eight (900 useful tokens/s at least; generation_texts.py), likelihoods of 100-token
samples at 38,000 tokens/s, a five-shot multiple-choice task at 3 x the harness's own batches. The fourth (lm_eval's `hf`, six tasks) is
benchmarks/engines.py. The result goes to benchmarks/results/generation-DEVICE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from generation_texts import compare_texts, timed
from machine import describe_machine, driver

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent)]


def load(folder: Path, on_gpu: bool, dtype: str, **options: Any) -> Any:
    """The fast way's model with the tiny tokenizer; on a GPU one of 5.9 B, whose random weights are drawn there and lie in no file."""
    from tests.support.tiny_model import write_tiny_model

    from unbroken.evaluate.contracts import ModelSpec
    from unbroken.evaluate.harness.fast.model import FastModel
    from unbroken.evaluate.harness.transformers import TransformersBackend
    from unbroken.evaluate.harness.transformers_model import TransformersModel

    if not (folder / "config.json").is_file():
        write_tiny_model(folder, hidden=64 if dtype == "float32" else 128, context=4096, dtype=dtype)
    spec = ModelSpec(str(folder), dtype=dtype, exact=False, options=options)
    if not on_gpu:
        model = TransformersBackend().load(spec, folder, ())
        assert isinstance(model, FastModel)  # as asked for
        return model
    import torch
    import transformers

    small = transformers.LlamaConfig.from_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=4096, bos_token_id=small.bos_token_id, eos_token_id=small.eos_token_id, attn_implementation="sdpa",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        large = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return FastModel(TransformersModel(spec, torch, transformers, large, tokenizer, ("cuda:0",)))


def text(rng: random.Random, tokens: int) -> str:
    """Words of about so many tokens: the tiny tokenizer has one for each of them."""
    from tests.support.tiny_tasks import WORDS

    return " ".join(rng.choice(WORDS) for _ in range(max(1, tokens)))


def compare(model: Any, torch: Any, requests: Sequence[Any], few: int) -> dict[str, Any]:
    """Likelihoods a second both ways; the exact way is asked the first few. What the first call makes ready is timed apart."""
    warm_s, _ = timed(lambda: model.respond(requests[:8]), torch)
    model.respond_exactly(requests[:8])
    read = model.tokens_read
    fast_s, fast = timed(lambda: model.respond(requests), torch)
    read = model.tokens_read - read
    exact_s, exact = timed(lambda: model.respond_exactly(requests[:few]), torch)
    return {
        "requests": len(requests), "first_call_s": warm_s, "seconds": fast_s, "tokens_read_per_s": read / fast_s,
        "requests_per_s": len(requests) / fast_s, "exact_requests_per_s": few / exact_s, "times": len(requests) / fast_s * exact_s / few,
        "alike": sum(_alike(a, b) for a, b in zip(fast, exact, strict=False)), "asked_both_ways": few,
    }  # fmt: skip


def as_is(model: Any, torch: Any, requests: Sequence[Any]) -> dict[str, Any]:
    """The same texts by continuous batching as it comes."""
    from unbroken.evaluate.harness.fast.model import FastModel

    model.close_texts()
    options = {
        **model.exact.spec.options,
        "generation": "as-is",
        "batch_tokens": model.conditions.batch_tokens,
    }
    model.exact.spec = dataclasses.replace(model.exact.spec, options=options)
    other = FastModel(model.exact)
    try:
        warm_s, _ = timed(lambda: other.respond(requests[:8]), torch)
        before = other.tokens_made
        seconds, _ = timed(lambda: other.respond(requests), torch)
        return {
            "first_call_s": warm_s,
            "seconds": seconds,
            "tokens_made_per_s": (other.tokens_made - before) / seconds,
        }
    finally:
        other.close_texts()


def _alike(a: Any, b: Any) -> bool:
    return abs(a[0] - b[0]) <= 0.02 * max(1.0, abs(b[0])) and a[1] == b[1]


TARGETS = (
    ("likelihoods", "tokens_read_per_s", 38_000),
    ("five shots", "times", 3),
    ("texts", "tokens_made_per_s", 900),
    ("texts", "times_static", 10),
)
"""Of one H200: (part, figure, at least)."""


def missed(result: Mapping[str, Any]) -> list[str]:
    """The targets that the parts of this result do not reach, each with what was measured."""
    return [
        f"{part}, {figure}: {result[part][figure]:.4g} of {least:,}"
        for part, figure, least in TARGETS
        if part in result and result[part][figure] < least
    ]


def main() -> int:
    """Measures, and says whether the targets of an H200 are reached; on a CPU it only shows that everything runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="on a CPU")
    parser.add_argument("--prompts", type=int, default=0, help="default: 256 on a GPU, 24 on a CPU")
    parser.add_argument("--parts", default="", help="some of texts,likelihoods,five shots; default: all")
    parser.add_argument(
        "--as-is", action="store_true", help="texts once more with the attention that transformers chooses"
    )
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    import torch

    from unbroken.evaluate.contracts import Request

    n = given.prompts or (256 if given.gpu else 24)
    long = 1.0 if given.gpu else 0.2
    rng = random.Random(0)
    # Nothing stops these texts: as many tokens both ways.
    texts = [
        Request("generate_until", (text(rng, int(rng.randrange(100, 700) * long)),
                                   {"until": [], "max_gen_toks": max(8, int(rng.randrange(32, 257) * long)), "do_sample": False}))
        for _ in range(n)
    ]  # fmt: skip
    likely = [Request("loglikelihood", (text(rng, 90), f" {text(rng, 10)}")) for _ in range(16 * n)]
    shots = text(rng, int(900 * long))
    choices = [
        Request("loglikelihood", (f"{shots} {question}", f" {text(rng, 8)}"))
        for question in [text(rng, 80) for _ in range(2 * n)]
        for _ in range(4)
    ]
    result: dict[str, Any] = {"machine": describe_machine(), "torch": torch.__version__}
    if given.gpu:
        result |= {"gpu": torch.cuda.get_device_name(), "driver": driver()}
    folder = tempfile.TemporaryDirectory()
    began = time.perf_counter()
    model = load(Path(folder.name), given.gpu, "bfloat16" if given.gpu else given.dtype)
    # The harness's batches of eight, though lengths differ: answered one by one they would take eight times as long.
    model.exact.mix_settings = True
    result["load_s"] = time.perf_counter() - began
    result["batch_tokens"] = model.conditions.batch_tokens
    print(json.dumps(result), flush=True)
    few = max(8, n // 16)
    wanted = given.parts.split(",") if given.parts else ["likelihoods", "five shots", "texts"]
    try:
        for name in wanted:
            if name == "texts":
                result[name] = compare_texts(model, torch, texts, max(8, n // 8))
            else:
                requests, some = (likely, 64 * few) if name == "likelihoods" else (choices, 8 * few)
                result[name] = compare(model, torch, requests, min(some, len(requests)))
            print(name, json.dumps(result[name]), flush=True)
        if given.as_is:
            result["texts as transformers attends"] = as_is(model, torch, texts)
            print("as is", json.dumps(result["texts as transformers attends"]), flush=True)
    finally:
        model.close()  # its thread would hold this process
    out = (
        Path(given.out)
        if given.out
        else HERE / "results" / f"generation-{'gpu' if given.gpu else 'cpu'}.json"
    )
    out.write_text(json.dumps(result, indent=1) + "\n")
    found = missed(result) if given.gpu else ["not measured: no GPU was asked for"]
    print(f"targets of an H200 ({', '.join(wanted)}): {'; '.join(found) or 'reached'}; {out}")
    return 1 if given.gpu and found else 0


if __name__ == "__main__":
    sys.exit(main())
