"""What the fast way gives on one device: texts, likelihoods, and a five-shot task, against the harness's own batches of eight.

    python benchmarks/generation.py                       # on a CPU, a tiny model, a minute
    python benchmarks/generation.py --gpu                 # one H200: a Llama of 5.9 B random weights in bfloat16, 256 prompts

The targets on one H200: texts at 10 x the batches of eight (900 useful tokens/s at least), likelihoods of 100-token samples at 38,000
tokens/s, a five-shot multiple-choice task at 3 x. The fourth (lm_eval's `hf`, six tasks) is benchmarks/engines.py. The result goes to
benchmarks/results/generation-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import describe_machine

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent)]


def made(folder: Path, on_gpu: bool) -> Path:
    """A model of random weights with the tiny tokenizer; on a GPU one of 5.9 B."""
    from tests.support.tiny_model import write_tiny_model

    write_tiny_model(folder, context=4096)
    if on_gpu:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        small = LlamaConfig.from_pretrained(folder)
        config = LlamaConfig(
            vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
            max_position_embeddings=4096, bos_token_id=small.bos_token_id, eos_token_id=small.eos_token_id,
        )  # fmt: skip
        (folder / "model.safetensors").unlink()
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            LlamaForCausalLM(config).save_pretrained(folder)
        torch.set_default_dtype(torch.float32)
        torch.cuda.empty_cache()
    return folder


def text(rng: random.Random, tokens: int) -> str:
    """Words of about so many tokens."""
    from tests.support.tiny_tasks import WORDS

    return " ".join(rng.choice(WORDS) for _ in range(max(1, tokens // 2)))


def timed(call: Callable[[], Any], torch: Any) -> tuple[float, Any]:
    """(seconds, what it gave)."""
    began = time.perf_counter()
    found = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, found


def compare(model: Any, torch: Any, requests: Sequence[Any], exact_share: float) -> dict[str, Any]:
    """Requests a second both ways; the slow way is asked a share of them. The first answers of each are not timed."""
    few = requests[: max(8, int(exact_share * len(requests)))]
    model.respond(requests[:8])
    model.exact.respond(few[:8])
    read, wrote = model.tokens_read, model.tokens_made
    fast_s, fast = timed(lambda: model.respond(requests), torch)
    read, wrote = model.tokens_read - read, model.tokens_made - wrote
    exact_s, exact = timed(lambda: model.exact.respond(few), torch)
    same = sum(_alike(a, b) for a, b in zip(fast, exact, strict=False))
    return {
        "requests": len(requests), "seconds": fast_s, "tokens_read_per_s": read / fast_s, "tokens_made_per_s": wrote / fast_s,
        "requests_per_s": len(requests) / fast_s, "exact_requests_per_s": len(few) / exact_s, "times": len(requests) / fast_s * exact_s / len(few),
        "alike": same, "asked_both_ways": len(few),
    }  # fmt: skip


def _alike(a: Any, b: Any) -> bool:
    return a == b if isinstance(a, str) else abs(a[0] - b[0]) <= 0.02 * max(1.0, abs(b[0])) and a[1] == b[1]


def main() -> int:
    """Measures, and says whether the targets of an H200 are reached; on a CPU it only shows that everything runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--prompts", type=int, default=0, help="default: 256 on a GPU, 24 on a CPU")
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    import torch

    from unbroken.evaluate.contracts import ModelSpec, Request
    from unbroken.evaluate.harness.fast.model import FastModel
    from unbroken.evaluate.harness.transformers import TransformersBackend

    n = given.prompts or (256 if given.gpu else 24)
    long = 1.0 if given.gpu else 0.2
    rng = random.Random(0)
    # The random model says its end of text now and then: texts of the same number of tokens both ways count alike.
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
        result["gpu"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec(
            str(made(Path(folder), given.gpu)), dtype="bfloat16" if given.gpu else "float32", exact=False
        )
        began = time.perf_counter()
        model = TransformersBackend().load(spec, Path(folder), (0,) if given.gpu else ())
        assert isinstance(model, FastModel)  # as asked for
        result["load_s"] = time.perf_counter() - began
        result["batch_tokens"] = model.conditions.batch_tokens
        for name, requests, share in (
            ("texts", texts, 0.125),
            ("likelihoods", likely, 0.25),
            ("five shots", choices, 0.25),
        ):
            result[name] = compare(model, torch, requests, share)
            print(name, json.dumps(result[name]), flush=True)
        model.close()
    out = (
        Path(given.out)
        if given.out
        else HERE / "results" / f"generation-{'gpu' if given.gpu else 'cpu'}.json"
    )
    out.write_text(json.dumps(result, indent=1) + "\n")
    reached = (
        result["texts"]["tokens_made_per_s"] >= 900 and result["texts"]["times"] >= 10
        and result["likelihoods"]["tokens_read_per_s"] >= 38_000 and result["five shots"]["times"] >= 3
    )  # fmt: skip
    print(
        f"targets of an H200: {'reached' if reached else 'not reached' if given.gpu else 'not measured'}; {out}"
    )
    return 0 if reached or not given.gpu else 1


if __name__ == "__main__":
    sys.exit(main())
