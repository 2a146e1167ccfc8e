"""Any OpenAI-compatible endpoint as a model: vLLM, SGLang, TGI, llama.cpp, a hosted API.

Without a chat template, prompts go to /completions: texts are continued, and log-probabilities come from `echo` with
`logprobs`, where the server gives them. With `chat_template = true` messages go to /chat/completions, which gives no
log-probabilities: tasks that need them are refused before anything is sent.

A request that fails is tried again (`link.openai.Retry`); one that fails for good becomes an answer with a problem:
counted as unanswered, never as wrong, and asked again by the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ModelDoesNotLoad, UnknownKey
from ...link.openai import Endpoint, EndpointRefused, Retry
from ..contracts import Conditions, Json, ModelSpec, Request, digest
from ..suite.asking import PROBLEM
from .requests import generation_settings, rolling_windows


@dataclass(frozen=True)
class OpenAIOptions:
    """`ModelSpec.options` of this backend."""

    attempts: int = 6
    timeout_s: float = 600.0
    """Of one call, generation included."""
    key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; the key itself belongs in no file."""
    seed: int = 1234
    context: int = 2048
    """Tokens that the model holds; only for long texts whose likelihood is asked for."""

    @classmethod
    def read(cls, spec: ModelSpec) -> OpenAIOptions:
        """Raises UnknownKey."""
        for key in spec.options:
            if key not in cls.__dataclass_fields__:
                raise UnknownKey(key, cls.__dataclass_fields__, where="options of the openai backend")
        return cls(**dict(spec.options))


class OpenAIBackend:
    """Talks to `spec.source`, a base URL; `spec.name` is the model's name there; `batch_size` calls run at once."""

    needs_weights = False
    options = tuple(OpenAIOptions.__dataclass_fields__)

    def kinds(self, spec: ModelSpec) -> frozenset[str]:
        """What can be asked: a chat endpoint gives no log-probabilities."""
        if spec.chat_template:
            return frozenset({"generate_until"})
        return frozenset({"generate_until", "loglikelihood", "loglikelihood_rolling", "multiple_choice"})

    def chat(self, spec: ModelSpec, model_files: Path | None) -> Callable[..., Any]:
        """Messages go out as they are: the server applies the template."""
        return lambda history, add_generation_prompt: list(history)

    def fingerprint(self, spec: ModelSpec) -> str | None:
        """Of the address, the model's name and what the endpoint says of it. Raises ModelDoesNotLoad."""
        about = _about(
            Endpoint(spec.source, spec.title, timeout_s=30.0, key_env=OpenAIOptions.read(spec).key_env), spec
        )
        stable = {k: v for k, v in about.items() if k not in ("created", "permission", "meta")}
        return digest([spec.source.rstrip("/"), about["id"], stable])

    def load(self, spec: ModelSpec, folder: Path | None, devices: Sequence[int]) -> OpenAIModel:
        """A client, after the endpoint has said that it serves the model. Raises ModelDoesNotLoad."""
        options = OpenAIOptions.read(spec)
        probe = Endpoint(spec.source, spec.title, timeout_s=30.0, key_env=options.key_env)
        name = str(_about(probe, spec)["id"])
        probe.close()
        return OpenAIModel(
            spec, options, Endpoint(spec.source, name, timeout_s=options.timeout_s, key_env=options.key_env)
        )


def _about(endpoint: Endpoint, spec: ModelSpec) -> dict[str, Json]:
    """What the endpoint says of the model that is meant."""
    try:
        served = endpoint.models()
    except EndpointRefused as e:
        hint = "Start the server, or fix the address"
        if e.status in (401, 403):
            hint = "Put the key into the environment variable that options.key_env names (OPENAI_API_KEY)"
        raise ModelDoesNotLoad(f"the endpoint does not answer: {e}", where=spec.source, hint=hint) from e
    if not spec.name and len(served) == 1:
        return dict(served[0])
    for m in served:
        if m.get("id") == spec.name:
            return dict(m)
    ids = ", ".join(str(m.get("id")) for m in served[:10]) or "none"
    raise ModelDoesNotLoad(
        f"the endpoint serves no model '{spec.title}', but: {ids}",
        where=spec.source,
        hint="Name one with name = ...",
    )


class OpenAIModel:
    """A client with retries, `batch_size` calls at once."""

    def __init__(self, spec: ModelSpec, options: OpenAIOptions, endpoint: Endpoint) -> None:
        self._spec, self._options, self._endpoint = spec, options, endpoint
        self.retry = Retry(options.attempts)
        self._calls = spec.batch_size
        self._pool = ThreadPoolExecutor(self._calls, thread_name_prefix="endpoint")

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """One output per request, in order; {"problem": why} where the endpoint gave none."""
        seen: dict[str, int] = {}
        jobs = []
        for r in requests:
            # The n-th repeat of a question has a seed of its own, whichever worker asks it.
            key = digest([r.kind, list(r.arguments)])
            seen[key] = seen.get(key, -1) + 1
            jobs.append((r, seen[key]))
        return list(self._pool.map(lambda job: self._answer(*job), jobs))

    def halve(self) -> bool:
        """False: an endpoint minds its own memory."""
        return False

    def restore(self) -> None:
        """Nothing to restore."""

    @property
    def conditions(self) -> Conditions:
        """What is known of how it runs: the endpoint keeps the rest to itself."""
        return Conditions(
            f"openai endpoint, model {self._endpoint.model}", "endpoint", self._spec.dtype, self._calls
        )

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._endpoint.close()

    def _answer(self, request: Request, repeat: int) -> Json:
        ask = {
            "generate_until": self._generate,
            "loglikelihood": self._loglikelihood,
            "multiple_choice": self._loglikelihood,
            "loglikelihood_rolling": self._rolling,
        }.get(request.kind)
        if ask is None:
            return {PROBLEM: f"an endpoint cannot answer a '{request.kind}' request"}
        try:
            return self.retry(lambda attempt: ask(request.arguments, repeat))
        except EndpointRefused as e:
            return {PROBLEM: str(e)}

    def _generate(self, arguments: Sequence[Json], repeat: int) -> Json:
        prompt, given = arguments
        settings = generation_settings(given)
        stops = settings.pop("until")
        body: dict[str, Json] = {
            "max_tokens": settings.pop("max_gen_toks"),
            "temperature": settings.pop("temperature", 1.0) if settings.pop("do_sample") else 0.0,
            "seed": self._options.seed + repeat,
            **{k: v for k, v in settings.items() if k in ("top_p", "top_k", "min_p", "repetition_penalty")},
        }
        if stops:
            body["stop"] = stops[:4]  # the protocol takes four; the rest is cut off below
        if isinstance(prompt, str):
            text = str(self._endpoint.complete(prompt, **body)[0]["text"])
        else:
            text = self._endpoint.chat(prompt, **body)
        for stop in stops:
            if stop:
                text = text.split(stop)[0]
        return text

    def _loglikelihood(self, arguments: Sequence[Json], repeat: int) -> Json:
        context, continuation = str(arguments[0]), str(arguments[1])
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        return list(self._scored(context, context + continuation))

    def _scored(self, context: str, whole: str) -> tuple[float, bool]:
        """(log-probability, is it greedy) of what follows `context` in `whole`, from the server's own tokens."""
        choice = self._endpoint.complete(
            whole, max_tokens=1, temperature=0.0, logprobs=1, echo=True, seed=self._options.seed
        )[0]
        tokens = choice.get("logprobs")
        if not tokens or "token_logprobs" not in tokens:
            raise EndpointRefused(
                "the endpoint gives no log-probabilities of the prompt (echo, logprobs)", again=False
            )
        values, tops = tokens["token_logprobs"], tokens.get("top_logprobs")
        starts = tokens.get("text_offset")
        if starts is None:
            starts, at = [], 0
            for t in tokens["tokens"]:
                starts.append(at)
                at += len(t)
        total, greedy, found = 0.0, True, False
        for i, (start, value) in enumerate(zip(starts, values, strict=True)):
            if start < len(context) or start >= len(whole):
                continue
            if value is None:
                continue  # the very first token has nothing before it
            found = True
            total += value
            if tops and tops[i] and value < max(tops[i].values()):
                greedy = False
        if not found:
            raise EndpointRefused(
                "no token of the continuation came back with a log-probability", again=False
            )
        return total, greedy

    def _rolling(self, arguments: Sequence[Json], repeat: int) -> Json:
        text = str(arguments[0])
        # Without the server's tokenizer the windows are cut by characters: four for a token, conservatively three.
        limit = 3 * self._options.context
        if len(text) <= limit:
            return self._scored("", text)[0]
        total = 0.0
        marks = list(range(len(text)))
        for context, continuation in rolling_windows(marks, -1, limit):
            read = "".join(text[i] for i in (*context, *continuation) if i >= 0)
            total += self._scored(read[: len(read) - len(continuation)], read)[0]
        return total
