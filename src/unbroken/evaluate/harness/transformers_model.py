"""A causal language model of transformers that answers requests; loaded by transformers.py.

The arithmetic follows lm-evaluation-harness' `hf` model step by step (where a pair is cut into tokens, which token
stands before an empty context, windows of long texts, padding, the type in which the softmax is taken), so that
on the same batches the numbers are the same bit for bit; a test compares the two. Within one call, requests are
sorted by length, and requests that differ in their last token alone share one forward pass, as there.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import EvaluationError, OutOfMemory
from ..contracts import Conditions, Json, ModelSpec, Request, digest
from .requests import generation_settings, rolling_windows
from .tokens import HarnessTokens, Pair, longest_of


class TransformersModel(HarnessTokens):
    """A causal language model, loaded."""

    def __init__(
        self,
        spec: ModelSpec,
        torch: Any,
        transformers: Any,
        model: Any,
        tokenizer: Any,
        target: Sequence[str],
    ) -> None:
        longest = spec.max_length or longest_of(model.config, tokenizer)
        super().__init__(tokenizer, longest, spec.options.get("add_bos_token"))
        self.spec, self.torch, self.transformers = spec, torch, transformers
        self.model = model.eval()
        self.target = tuple(target)
        self._batch = spec.batch_size
        self.mix_settings = False
        """Greedy generations of other lengths and stop strings may share a batch; a harness that defines its batches by
        equal settings (lm_eval) keeps them apart, so that the arithmetic is its own."""
        self.device = torch.device(target[0])
        self._torchs_attention = bool(spec.options.get("cudnn_attention", False))

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """One output per request, in order. Raises OutOfMemory when a batch does not fit."""
        out: list[Json] = [None] * len(requests)
        kinds: dict[str, list[int]] = {}
        for i, r in enumerate(requests):
            kinds.setdefault("loglikelihood" if r.kind == "multiple_choice" else r.kind, []).append(i)
        answer = {
            "loglikelihood": self._loglikelihood,
            "loglikelihood_rolling": self._rolling,
            "generate_until": self._generate,
        }
        try:
            with self.torch.inference_mode():
                for kind, places in kinds.items():
                    if kind not in answer:
                        raise EvaluationError(
                            f"a transformers model cannot answer a '{kind}' request",
                            hint="Use PlainBackend, or let infer.py define prompt(row)",
                        )
                    for i, value in zip(
                        places, answer[kind]([requests[i].arguments for i in places]), strict=True
                    ):
                        out[i] = value
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(self.torch, e):
                raise
            raise self.out_of_memory() from None
        return out

    def halve(self) -> bool:
        """Halves the batch size; False if it is 1 already."""
        if self._batch <= 1:
            return False
        self._batch //= 2
        return True

    def restore(self) -> None:
        """Back to the batch size that was asked for; with an automatic one, nearer to the largest."""
        wanted = self.spec.batch_size
        self._batch = min(wanted, self._batch * 2) if self.spec.batch_auto else wanted

    @property
    def conditions(self) -> Conditions:
        """What may move the last digits."""
        name = self.target[0] if self.target[0] == "cpu" else self.torch.cuda.get_device_name(self.device)
        if len(self.target) > 1:
            name = f"{len(self.target)} x {name}"
        return Conditions(
            engine=f"transformers {self.transformers.__version__}, torch {self.torch.__version__}",
            device=name,
            dtype=str(self.model.dtype).removeprefix("torch."),
            batch_size=self._batch,
            padding="right for likelihoods, left for generation",
        )

    def close(self) -> None:
        """Frees the device."""
        self.model = None
        gc.collect()
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()

    # ------------------------------------------------------------------ likelihoods

    def _loglikelihood(self, arguments: Sequence[Sequence[Json]]) -> list[Json]:
        return self._score([self.pair(i, str(a[0]), str(a[1])) for i, a in enumerate(arguments)], self._batch)

    def _score(self, pairs: Sequence[Pair], batch: int) -> list[Json]:
        """[log-probability, is it the greedy continuation] of each pair."""
        shared: dict[tuple[int, ...], list[Pair]] = {}
        for p in pairs:
            shared.setdefault(p.key, []).append(p)
        # The longest continuation stands for its group: its logits cover the others'.
        stand_in = [max(group, key=lambda p: len(p.continuation)) for group in shared.values()]
        stand_in.sort(key=lambda p: (-len(p.context + p.continuation), p.context + p.continuation))
        out: dict[int, Json] = {}
        for at in range(0, len(stand_in), batch):
            chunk = stand_in[at : at + batch]
            for p, probabilities in zip(chunk, self._log_softmax(chunk), strict=True):
                greedy = probabilities.argmax(dim=-1)
                for member in shared[p.key]:
                    tokens = self.torch.tensor(
                        member.continuation, dtype=self.torch.long, device=greedy.device
                    )
                    n = len(tokens)
                    picked = probabilities[-n:].gather(1, tokens.unsqueeze(-1)).squeeze(-1)
                    out[member.index] = [float(picked.sum()), bool((greedy[-n:] == tokens).all())]
        return [out[p.index] for p in pairs]

    def _log_softmax(self, chunk: Sequence[Pair]) -> Iterator[Any]:
        """Log-probabilities [tokens of the continuation, vocabulary] of each pair of a batch."""
        torch = self.torch
        inputs = [(p.context + p.continuation)[-(self.max_length + 1) :][:-1] for p in chunk]
        longest = max(map(len, inputs))
        padded = torch.tensor(
            [[*i, *([0] * (longest - len(i)))] for i in inputs], dtype=torch.long, device=self.device
        )
        logits = self.model(padded).logits
        for row, i, p in zip(logits, inputs, chunk, strict=True):
            yield torch.log_softmax(row[len(i) - len(p.continuation) : len(i)], dim=-1)

    def _rolling(self, arguments: Sequence[Sequence[Json]]) -> list[Json]:
        windows: list[Pair] = []
        owner: list[int] = []
        for i, (text,) in enumerate(arguments):
            for context, continuation in rolling_windows(
                self.encode(str(text)), self.prefix, self.max_length
            ):
                windows.append(Pair(len(windows), context, continuation))
                owner.append(i)
        totals = [0.0] * len(arguments)
        for at in range(0, len(windows), self._batch):
            batch = windows[at : at + self._batch]
            for w, (value, _) in zip(batch, self._score(batch, self._batch), strict=True):
                totals[owner[w.index]] += value
        return list(totals)

    # ------------------------------------------------------------------ generation

    def _generate(self, arguments: Sequence[Sequence[Json]]) -> list[Json]:
        out: list[Json] = [None] * len(arguments)
        lengths = [len(self.encode(str(a[0]))) for a in arguments]
        settings = [generation_settings(a[1]) for a in arguments]
        groups: dict[str, list[int]] = {}
        for i, (given, (_, asked)) in enumerate(zip(settings, arguments, strict=True)):
            wanted = int(given["max_gen_toks"])
            out[i] = self.too_long(wanted)
            if out[i] is not None:  # no reason for its neighbours to go without an answer
                continue
            mixes = self.mix_settings and not given["do_sample"] and "max_length" not in given
            # A prompt that is cut to leave room for its answer is cut by its own limit: it stays among its like.
            mixes = mixes and lengths[i] + wanted <= self.max_length
            rest = {k: v for k, v in given.items() if k not in ("until", "max_gen_toks")}
            groups.setdefault(digest(["mixed", rest]) if mixes else digest(asked), []).append(i)
        for places in groups.values():
            order = sorted(
                places, key=lambda i: (-settings[i]["max_gen_toks"], -lengths[i], str(arguments[i][0]))
            )
            for chunk in self._chunks(order, lengths, [int(s["max_gen_toks"]) for s in settings]):
                # Of the same question asked again: other draws.
                first = chunk[0]
                drawn = settings[first]["do_sample"]
                again = sum(arguments[i] == arguments[first] for i in range(first)) if drawn else 0
                texts = self.continue_texts(
                    [str(arguments[i][0]) for i in chunk], [settings[i] for i in chunk], again
                )
                for i, text in zip(chunk, texts, strict=True):
                    out[i] = text
        return out

    def _chunks(
        self, order: Sequence[int], lengths: Sequence[int], limits: Sequence[int]
    ) -> Iterator[list[int]]:
        """Batches, in this order (longest answers first); where limits differ no prompt is cut for another one's answer."""
        chunk: list[int] = []
        for i in order:
            differs = bool(chunk) and limits[i] != limits[chunk[0]]
            cut = differs and max(lengths[j] for j in [*chunk, i]) + limits[chunk[0]] > self.max_length
            if len(chunk) == self._batch or cut:
                yield chunk
                chunk = []
            chunk.append(i)
        if chunk:
            yield chunk

    def continue_texts(
        self, prompts: list[str], settings: Sequence[Mapping[str, Any]], again: int = 0
    ) -> list[str]:
        """One text per prompt, in one batch; the settings differ in `until` and `max_gen_toks` at most. `again`: how often its
        first question was asked before in other batches: its draws are others each time."""
        return [text for text, _ in self.continue_within(prompts, settings, 0.0, again)]

    def continue_within(
        self, prompts: list[str], settings: Sequence[Mapping[str, Any]], seconds: float, again: int = 0
    ) -> list[tuple[str, bool]]:
        """The same for so many seconds at most (0: as long as it takes), and whether each text had not ended by then."""
        given = {k: v for k, v in settings[0].items() if k not in ("max_gen_toks", "until")}
        limits = [int(s["max_gen_toks"]) for s in settings]
        new_tokens = max(limits)
        stops = [self.stops(s) for s in settings]
        room = self.max_length - new_tokens
        tokens, mask = self._encode_batch(prompts, room)
        if given.get("do_sample"):
            # The same draws for the same prompts, whichever worker meets them, and when.
            drawn = [prompts, settings[0], *([again] if again else [])]
            self.torch.manual_seed(int(digest(drawn)[:12], 16))
        length = given.pop("max_length", tokens.shape[1] + new_tokens)
        if seconds:
            given["max_time"] = seconds
        with repeatable_generation(str(self.device), torchs_own=self._torchs_attention):
            made = self.model.generate(
                input_ids=tokens,
                attention_mask=mask,
                max_length=length,
                stopping_criteria=_stopping(
                    self.transformers, self.tokenizer, stops, limits, tokens.shape[1]
                ),
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                **given,
            )
        texts = []
        for row, own, limit in zip(made.tolist(), stops, limits, strict=True):
            # With one limit for all, `length` has held it already (and may say another thing).
            end = tokens.shape[1] + limit if limit < new_tokens else None
            text = self.text(row[tokens.shape[1] : end], own)
            whole = self.tokenizer.decode(row[tokens.shape[1] : end])
            ended = len(row) - tokens.shape[1] >= limit or any(stop and stop in whole for stop in own)
            texts.append((text, bool(seconds) and not ended))
        return texts

    # ------------------------------------------------------------------ tokens

    def _encode_batch(self, texts: list[str], room: int) -> tuple[Any, Any]:
        more = self._special_of_prompt(texts[0])
        before = self.tokenizer.padding_side
        self.tokenizer.padding_side = "left"
        encoded = self.tokenizer(texts, padding="longest", return_tensors="pt", **more)
        self.tokenizer.padding_side = before
        return (
            encoded["input_ids"][:, -room:].to(self.device),
            encoded["attention_mask"][:, -room:].to(self.device),
        )

    def out_of_memory(self) -> OutOfMemory:
        gc.collect()
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()
        return OutOfMemory(
            f"a batch of {self._batch} does not fit", where=named(self.target), hint="Lower batch_size"
        )


def repeatable_generation(
    device: str, *, torchs_own: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Keeps generation on a GPU off cuDNN's attention, or does nothing if that is wanted (`torchs_own`).

    On Hopper greedy answers were seen to differ from run to run. There torch gives cuDNN attention under a padding mask,
    and leaves it out itself where deterministic algorithms are asked for. Without it three processes give the same answers
    (tests/gpu/test_evaluate_cuda.py). Likelihoods carry no mask, had the same bits, and keep the kernels that the harness
    alone would have.
    """
    if torchs_own or not device.startswith("cuda"):
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    kernels: contextlib.AbstractContextManager[None] = sdpa_kernel(others)
    return kernels


def _stopping(
    transformers: Any,
    tokenizer: Any,
    stops: Sequence[Sequence[str]],
    limits: Sequence[int],
    prompt_length: int,
) -> Any:
    """Stops once every row holds one of its stop strings or has its number of tokens; looks only at the end of what was
    generated. Rows of equal settings stop as lm_eval has them stop: once all of them hold the same string."""
    mixed = any(s != stops[0] for s in stops) or len(set(limits)) > 1
    tails = {s: len(tokenizer.encode(s, add_special_tokens=False)) + 2 for own in stops for s in own}
    """Two tokens more than the string takes: a model may spell it otherwise than the tokenizer."""

    class Stops(transformers.StoppingCriteria):  # type: ignore[misc]
        def __init__(self, stop: str, rows: Sequence[int]) -> None:
            self.stop, self.rows, self.tail = stop, rows, tails[stop]
            self.done = together if mixed else [False] * len(stops)

        def __call__(self, input_ids: Any, scores: Any, **more: Any) -> bool:
            texts = tokenizer.batch_decode(input_ids[:, prompt_length:][:, -self.tail :])
            for i in self.rows:
                self.done[i] = self.done[i] or self.stop in texts[i]
            return all(self.done)

    class Limits(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **more: Any) -> bool:
            made = input_ids.shape[1] - prompt_length
            for i, limit in enumerate(limits):
                together[i] = together[i] or made >= limit
            return all(together)

    together = [False] * len(stops)
    found: list[Any] = [Stops(s, [i for i, own in enumerate(stops) if s in own]) for s in tails]
    if mixed:
        found.append(Limits())
    return transformers.StoppingCriteriaList(found)


def is_out_of_memory(torch: Any, error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def named(target: Sequence[str]) -> str:
    return ", ".join(target)
