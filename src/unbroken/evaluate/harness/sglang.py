"""SGLang as a backend, through its Python engine: `--backend sglang`.

What is asked and how answers are read is vLLM's (vllm.py); this file gives SGLang's engine that face: requests in, a step, what has
ended. Its engine answers through coroutines on an event loop of its own, which the worker's main thread drives in `step`.

Written against sglang 0.5.23 and tested with a stand-in of its interface (`tests/evaluate/test_sglang.py`): SGLang runs on GPUs only,
and has not been run with this.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...errors import EvaluationError, ModelDoesNotLoad
from ..contracts import Conditions, Json, ModelSpec
from .vllm import VllmModel

STEP_S = 1.0
"""A step waits so long for an answer at most."""
TOP = 1
"""Likeliest tokens that come with each token of a prompt: enough to see whether it is the greedy one."""


class SglangBackend:
    """Loads a folder with SGLang. Options: `model_args` (of its ServerArgs, as they are: mem_fraction_static, quantization, ...),
    `trust_remote_code`, `add_bos_token`, `chat_template_args`, `at_once` (samples in flight), `sample_seconds`."""

    needs_weights = True
    ways = ("fast",)
    options = ("model_args", "trust_remote_code", "add_bos_token", "chat_template_args", "at_once", "sample_seconds")  # fmt: skip

    def fingerprint(self, spec: ModelSpec) -> str | None:
        """None: the files of the folder are hashed."""
        return None

    def warm(self) -> None:
        """Imports SGLang."""
        with contextlib.redirect_stdout(sys.stderr):
            import sglang  # noqa: F401

    def load(self, spec: ModelSpec, folder: Path | None, devices: Sequence[int]) -> SglangModel:
        """The model on these GPUs (tensor parallel). Raises ModelDoesNotLoad."""
        if importlib.util.find_spec("sglang") is None:
            raise ModelDoesNotLoad("SGLang is not installed", where=self.__module__,
                                   hint="pip install sglang (GPUs), or say --backend transformers")  # fmt: skip
        return SglangModel(spec, str(folder or spec.source), devices)


class SglangModel(VllmModel):
    """A FedModel, as VllmModel; the engine is SGLang's."""

    @property
    def conditions(self) -> Conditions:
        """What may move the last digits."""
        dtype, device = self._device
        return Conditions(f"sglang {_sglang().__version__}", device, str(dtype).removeprefix("torch."), 0, "continuous batches")  # fmt: skip

    def _library(self) -> Any:
        return SimpleNamespace(SamplingParams=AskedOfEngine, TokensPrompt=dict)

    def _start(self) -> Any:
        given = dict(self.spec.options.get("model_args", {}) or {})
        settings: dict[str, Any] = {
            "model_path": self._place, "tokenizer_path": self.spec.tokenizer or None, "dtype": self.spec.dtype,
            "context_length": self.spec.max_length, "tp_size": max(1, len(self._devices)), "log_level": "warning", "random_seed": 0,
            "trust_remote_code": bool(self.spec.options.get("trust_remote_code", False)), **given,
        }  # fmt: skip
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return FedEngine(_sglang().Engine(**settings))
        except Exception as e:  # whatever an engine raises
            text = (str(e).strip().splitlines() or [""])[0][:300]
            raise ModelDoesNotLoad(f"SGLang does not load the model: {type(e).__name__}: {text}", where=self._place,
                                   hint="See the worker's log; --backend transformers does without") from e  # fmt: skip


@dataclass
class AskedOfEngine:
    """The settings of a request under vLLM's names, as VllmModel gives them."""

    temperature: float = 0.0
    max_tokens: int = 1
    stop: Sequence[str] = ()
    seed: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    prompt_logprobs: int | None = None
    prompt_start: int = 0
    """Log-probabilities of a prompt from this token on: those before it may come from the cache."""
    logprob_token_ids: Sequence[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    __struct_fields__ = ("temperature", "max_tokens", "stop", "seed", "top_p", "top_k", "min_p", "frequency_penalty",
                         "presence_penalty", "repetition_penalty", "logprob_token_ids", "prompt_logprobs", "prompt_start")  # fmt: skip

    def sampling(self) -> dict[str, Json]:
        """SGLang's sampling parameters."""
        more = {"sampling_seed": self.seed, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p,
                "frequency_penalty": self.frequency_penalty, "presence_penalty": self.presence_penalty,
                "repetition_penalty": self.repetition_penalty}  # fmt: skip
        return {"temperature": self.temperature, "max_new_tokens": self.max_tokens, "stop": list(self.stop),
                "skip_special_tokens": self.skip_special_tokens, "spaces_between_special_tokens": self.spaces_between_special_tokens,
                "no_stop_trim": True, **{k: v for k, v in more.items() if v is not None}}  # fmt: skip


class FedEngine:
    """SGLang's engine with the calls of vLLM's: `add_request`, `step`, `abort_request`, `has_unfinished_requests`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop = engine.loop
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._outputs: list[Any] = []
        config = engine.tokenizer_manager.model_config
        self.model_config = SimpleNamespace(dtype=config.dtype, max_model_len=int(config.context_len))
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
        self.engine_core = SimpleNamespace(shutdown=self._shutdown)

    def add_request(self, name: str, prompt: Mapping[str, Any], params: AskedOfEngine) -> None:
        """Queues a request: it begins with the next step."""
        self._tasks[name] = self._loop.create_task(
            self._answer(name, list(prompt["prompt_token_ids"]), params)
        )

    def has_unfinished_requests(self) -> bool:
        """Whether something is still to come."""
        return bool(self._tasks or self._outputs)

    def step(self) -> list[Any]:
        """What has ended, or gone on, since the last step. Raises EvaluationError where the engine raised."""
        if not self._outputs and self._tasks:
            waiting = asyncio.wait(self._tasks.values(), timeout=STEP_S, return_when=asyncio.FIRST_COMPLETED)
            self._loop.run_until_complete(waiting)
        for name in [n for n, t in self._tasks.items() if t.done()]:
            task = self._tasks.pop(name)
            if not task.cancelled() and (e := task.exception()) is not None:
                raise EvaluationError(f"SGLang failed: {type(e).__name__}: {str(e)[:300]}", hint="See the worker's log") from e  # fmt: skip
        found, self._outputs = self._outputs, []
        return found

    def abort_request(self, names: Sequence[str]) -> None:
        """Ends requests; nothing comes of them any more."""
        for name in names:
            task = self._tasks.pop(name, None)
            if task is not None:
                self._engine.tokenizer_manager.abort_request(rid=name)
                task.cancel()

    # ---- inside

    def _shutdown(self) -> None:
        self.abort_request(list(self._tasks))
        self._engine.shutdown()

    async def _answer(self, name: str, tokens: list[int], params: AskedOfEngine) -> None:
        wants = params.prompt_logprobs is not None or params.logprob_token_ids is not None
        start = max(0, params.prompt_start - 1) if params.prompt_logprobs is not None else len(tokens)
        found = await self._engine.async_generate(
            input_ids=tokens, sampling_params=params.sampling(), rid=name, stream=True, return_logprob=wants,
            logprob_start_len=start if wants else None, top_logprobs_num=TOP if wants else None,
            token_ids_logprob=list(params.logprob_token_ids) if params.logprob_token_ids is not None else None,
        )  # fmt: skip
        async for part in found:
            self._outputs.append(_as_output(name, part, start))


def _as_output(name: str, part: Mapping[str, Any], start: int) -> Any:
    """One of SGLang's outputs (all that there is so far) as vLLM gives it."""
    meta = part["meta_info"]
    prompt: list[dict[int, float] | None] = [None] * start
    tops = meta.get("input_top_logprobs") or []
    for i, (value, token, _) in enumerate(meta.get("input_token_logprobs") or []):
        top = tops[i] if i < len(tops) and tops[i] else []
        own = {} if value is None else {int(token): float(value)}
        prompt.append({int(t): float(v) for v, t, _ in top} | own if own or top else None)
    first: dict[int, float] = {}
    for rows in (meta.get("output_token_ids_logprobs"), meta.get("output_top_logprobs")):
        first |= {int(t): float(v) for v, t, _ in (rows[0] if rows and rows[0] else [])}
    made = SimpleNamespace(
        text=part.get("text", ""), token_ids=list(part.get("output_ids") or []), logprobs=[first]
    )
    return SimpleNamespace(request_id=name, finished=meta.get("finish_reason") is not None, prompt_logprobs=prompt, outputs=[made])  # fmt: skip


def _sglang() -> Any:
    import sglang

    return sglang
