"""Any model class of lm-evaluation-harness as a backend: `--backend unbroken.evaluate.harness.lm_eval_models:LmEvalBackend`.

`options.model` names it (`hf`, `vllm`, `sglang`, ...), `options.model_args` holds its arguments, `cudnn_attention`
is as for the backend `transformers`. Each block is one call; with batch size 1, or a block that holds the
whole task, batches are those of `lm_eval` run alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ModelDoesNotLoad, OutOfMemory, UsageError
from ..contracts import Conditions, Json, ModelSpec, Request
from .lm_eval.task_index import quiet_lm_eval
from .transformers import TransformersBackend
from .transformers_model import repeatable_generation
from .weights import weights_checked


class LmEvalBackend:
    """Loads lm_eval's own models."""

    needs_weights = True
    options = ("model", "model_args", "cudnn_attention", "chat_template_args")

    def fingerprint(self, spec: ModelSpec) -> str | None:
        """None: the files of the folder are hashed."""
        return None

    def warm(self) -> None:
        """Imports what takes seconds to import."""
        quiet_lm_eval()
        TransformersBackend().warm()  # which vLLM and the others need too
        import lm_eval.api.registry  # noqa: F401

    def load(self, spec: ModelSpec, folder: Path | None, devices: Sequence[int]) -> LmEvalModel:
        """The model. Raises ModelDoesNotLoad, UsageError."""
        quiet_lm_eval()
        from lm_eval.api.registry import get_model

        name = str(spec.options.get("model", "hf"))
        arguments = {"pretrained": str(folder or spec.source), **dict(spec.options.get("model_args", {}))}
        if name == "hf":
            arguments.setdefault("dtype", spec.dtype)
            arguments.setdefault("device", "cuda:0" if devices else "cpu")
        if spec.max_length:
            arguments.setdefault("max_length", spec.max_length)
        arguments["batch_size"] = spec.batch_size
        try:
            kind = get_model(name)
        except (KeyError, ValueError) as e:
            raise UsageError(f"lm_eval has no model class '{name}'", hint="See `lm_eval --help`") from e
        try:
            with contextlib.redirect_stdout(sys.stderr), weights_checked(str(folder or spec.source)):
                return LmEvalModel(spec, name, kind(**arguments), devices)
        except ModelDoesNotLoad:
            raise
        except Exception as e:
            raise ModelDoesNotLoad(
                f"lm_eval's '{name}' does not load: {type(e).__name__}: {str(e)[:300]}",
                where=str(folder or spec.source),
            ) from e


class LmEvalModel:
    """One of lm_eval's models."""

    def __init__(self, spec: ModelSpec, name: str, lm: Any, devices: Sequence[int]) -> None:
        self._spec, self._name, self._lm, self._devices = spec, name, lm, tuple(devices)
        self._batch = spec.batch_size
        # Known by name under several names; importing it to ask would cost what vLLM does not need.
        self._transformers = any(kind.__name__ == "HFLM" for kind in type(lm).__mro__)

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """One output per request, in order."""
        from lm_eval.api.instance import Instance

        out: list[Json] = [None] * len(requests)
        kinds: dict[str, list[int]] = {}
        for i, r in enumerate(requests):
            kinds.setdefault("loglikelihood" if r.kind == "multiple_choice" else r.kind, []).append(i)
        try:
            for kind, places in kinds.items():
                instances = [
                    Instance(kind, {}, tuple(requests[i].arguments), 0, metadata=("", i, 1)) for i in places
                ]
                own = kind != "generate_until" or bool(self._spec.options.get("cudnn_attention", False))
                device = str(getattr(self._lm, "device", "cpu"))
                with (
                    contextlib.redirect_stdout(sys.stderr),
                    repeatable_generation(device, torchs_own=own or not self._transformers),
                ):
                    answers = getattr(self._lm, kind)(instances, disable_tqdm=True)
                for i, a in zip(places, answers, strict=True):
                    out[i] = [float(a[0]), bool(a[1])] if isinstance(a, tuple) else a
        except RuntimeError as e:
            if "out of memory" in str(e).lower() or "can't allocate memory" in str(e):
                raise OutOfMemory(f"a batch of {self._batch} does not fit", where=self._name) from e
            raise
        return out

    def halve(self) -> bool:
        """Halves the batch size, where the class has one."""
        if self._batch <= 1 or not hasattr(self._lm, "batch_size_per_gpu"):
            return False
        self._batch //= 2
        self._lm.batch_size_per_gpu = self._batch
        return True

    def restore(self) -> None:
        """Back to what was asked for."""
        self._batch = self._spec.batch_size
        if hasattr(self._lm, "batch_size_per_gpu"):
            self._lm.batch_size_per_gpu = self._batch

    @property
    def conditions(self) -> Conditions:
        """What may move the last digits."""
        from importlib.metadata import version

        dtype = str(getattr(getattr(self._lm, "model", None), "dtype", self._spec.dtype)).removeprefix(
            "torch."
        )
        device = str(getattr(self._lm, "device", "cpu"))
        return Conditions(f"lm_eval {version('lm_eval')} {self._name}", device, dtype, self._batch)

    def close(self) -> None:
        """Drops the model."""
        self._lm = None
