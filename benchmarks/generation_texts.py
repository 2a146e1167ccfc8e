"""The part of generation.py that asks for texts: the fast way beside static batches of eight, in the same run and on the same prompts.

Three things are timed: the fast way; bare `generate` in static batches of eight, as the figure of 86 tokens/s was measured that the target
multiplies; and `--exact`. Then what differs between the fast way and `--exact` is explained: how often the exact way in batches of another
size differs from itself, and how near the two tokens were at which texts part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

BATCH = 8
OTHER_BATCH = 16
"""Of the exact way once more: what the size of a batch alone changes."""


def timed(call: Callable[[], Any], torch: Any) -> tuple[float, Any]:
    """(seconds, what it gave)."""
    began = time.perf_counter()
    found = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, found


def compare_texts(model: Any, torch: Any, requests: Sequence[Any], asked_both_ways: int) -> dict[str, Any]:
    """Useful tokens a second in each way, and where texts of the first `asked_both_ways` requests differ, in the order given."""
    exact, few = model.exact, requests[:asked_both_ways]
    # Texts as the numbers of their tokens: the tiny tokenizer has no word for most of them.
    exact.text = lambda tokens, stops: " ".join(map(str, tokens))
    warm_s, _ = timed(lambda: model.respond(requests[:BATCH]), torch)
    model.respond_exactly([_short(r) for r in few[:BATCH]])
    read, wrote = model.tokens_read, model.tokens_made
    fast_s, fast = timed(lambda: model.respond(requests), torch)
    read, wrote = model.tokens_read - read, model.tokens_made - wrote
    exact_s, texts = timed(lambda: model.respond_exactly(few), torch)
    before, exact._batch = exact._batch, OTHER_BATCH
    others = model.respond_exactly(few)
    exact._batch = before
    static_s = timed(lambda: static_batches(model, torch, few), torch)[0]
    asked = sum(limit_of(r) for r in few)
    pairs = [(r, _tokens(a), _tokens(b)) for r, a, b in zip(few, fast, texts, strict=False)]
    found = {
        "requests": len(requests), "first_call_s": warm_s, "seconds": fast_s, "tokens_read_per_s": read / fast_s,
        "tokens_made_per_s": wrote / fast_s, "requests_per_s": len(requests) / fast_s,
        "asked_both_ways": len(few), "static_tokens_made_per_s": asked / static_s, "exact_tokens_made_per_s": asked / exact_s,
        "times_static": wrote / fast_s * static_s / asked, "times_exact": wrote / fast_s * exact_s / asked,
        "alike": sum(a == b for _, a, b in pairs),
        f"exact_alike_in_batches_of_{OTHER_BATCH}": sum(a == b for a, b in zip(texts, others, strict=True)),
    }  # fmt: skip
    return found | nearness(model, torch, pairs)


def static_batches(model: Any, torch: Any, requests: Sequence[Any]) -> None:
    """transformers' `generate` and nothing else: batches of eight by the length of their prompts, each until its longest text ends."""
    exact = model.exact
    prompts = [_prompt(model, r) for r in requests]
    order = sorted(range(len(requests)), key=lambda i: len(prompts[i]))
    with model._texts.paused(), torch.inference_mode():
        for at in range(0, len(order), BATCH):
            chunk = order[at : at + BATCH]
            width = max(len(prompts[i]) for i in chunk)
            new = max(limit_of(requests[i]) for i in chunk)
            rows = [[0] * (width - len(prompts[i])) + prompts[i] for i in chunk]
            mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chunk]
            exact.model.generate(
                torch.tensor(rows, device=exact.device), attention_mask=torch.tensor(mask, device=exact.device), do_sample=False,
                max_new_tokens=new, min_new_tokens=new, pad_token_id=0,
            )  # fmt: skip


def nearness(model: Any, torch: Any, pairs: Sequence[tuple[Any, list[int], list[int]]]) -> dict[str, Any]:
    """How far apart the two tokens are at which texts part, and how far the two likeliest tokens are elsewhere, in steps of the
    model's number format at that size: where rounding alone decides, the first is one or two steps and the second many."""
    parted, elsewhere = [], []
    bits = {torch.bfloat16: 7, torch.float16: 10}.get(model.exact.model.dtype, 23)
    with model._texts.paused(), torch.inference_mode():
        for request, a, b in pairs:
            prompt = _prompt(model, request)
            ids = torch.tensor([prompt + b[:-1]], device=model.exact.device)
            logits = model.exact.model(ids).logits[0, len(prompt) - 1 :].float()
            best = logits.topk(2, dim=-1).values
            step = torch.exp2(torch.floor(torch.log2(best[:, 0].abs())) - bits)
            elsewhere += ((best[:, 0] - best[:, 1]) / step).tolist()
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if at is not None:
                parted.append(float((logits[at, a[at]] - logits[at, b[at]]).abs() / step[at]))
    return {
        "steps_between_tokens_where_texts_part": sorted(round(x, 1) for x in parted),
        "steps_between_the_likeliest_tokens_median": round(statistics.median(elsewhere), 1),
        "share_of_positions_within_two_steps": round(sum(x <= 2 for x in elsewhere) / len(elsewhere), 4),
    }


def limit_of(r: Any) -> int:
    """Tokens that a text may have: all of them are used, since nothing stops these."""
    return int(r.arguments[1]["max_gen_toks"]) if r.kind == "generate_until" else 0


def _prompt(model: Any, r: Any) -> list[int]:
    return model.exact.encode_all({str(r.arguments[0])}, prompts=True)[str(r.arguments[0])]


def _tokens(text: str) -> list[int]:
    return [int(t) for t in text.split()]


def _short(r: Any) -> Any:
    return type(r)(r.kind, (r.arguments[0], {**r.arguments[1], "max_gen_toks": 4}))
