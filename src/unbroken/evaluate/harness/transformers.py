"""Loads Hugging Face models on a GPU or CPU, with torch and transformers alone; transformers_model.py runs them."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import MissingExtra, ModelDoesNotLoad
from ..contracts import ModelSpec
from ..processes.garbage import without_collecting
from .fast.model import FastModel
from .transformers_model import TransformersModel, is_out_of_memory, named
from .weights import weights_checked


class TransformersBackend:
    """Loads a folder with `AutoModelForCausalLM`. Options: `trust_remote_code`, `attn_implementation`,
    `add_bos_token`, `chat_template_args`, `cudnn_attention` (for generation too: see
    `repeatable_generation`), `threads` (CPU only; 1 where nothing is said), `allow_missing` (weights that the files lack
    are random, instead of an error). Of the fast way: `batch_tokens` (instead of what is measured), `generation` ("static":
    no continuous batching; "as-is": with the attention that transformers chooses), `at_once` (samples in flight),
    `sample_seconds` (a text ends so long after its first token, and what there is of it counts)."""

    needs_weights = True
    ways = ("fast", "exact")
    """How it can be asked; the first one where nothing is said."""
    options = (
        "trust_remote_code", "attn_implementation", "add_bos_token", "chat_template_args", "cudnn_attention", "threads",
        "allow_missing", "batch_tokens", "generation", "at_once", "sample_seconds",
    )  # fmt: skip

    def fingerprint(self, spec: ModelSpec) -> str | None:
        """None: the files of the folder are hashed."""
        return None

    def warm(self) -> None:
        """Imports what takes seconds to import, as far as it is the same for every decoder."""
        with quick_imports():
            import torch  # noqa: F401
            import transformers

            # Half of it is imported with the first model's class; this one brings nothing that others do not need.
            _ = transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.LlamaForCausalLM

    def warm_devices(self, devices: Sequence[int]) -> None:
        """Makes the contexts of these GPUs, and what their first product of matrices needs."""
        import torch

        for place in _gpus(torch, devices):
            x = torch.ones((64, 64), dtype=torch.bfloat16, device=place)
            (x @ x).sum().item()

    def load(
        self, spec: ModelSpec, folder: Path | None, devices: Sequence[int]
    ) -> TransformersModel | FastModel:
        """The model on these GPUs; on several, its layers are spread over them. Raises ModelDoesNotLoad."""
        try:
            self.warm()
            import torch
            import transformers
        except ModuleNotFoundError as e:
            raise MissingExtra(e.name or "transformers", "eval", what="the transformers backend") from e
        if spec.exact and spec.options.get("sample_seconds"):
            raise ModelDoesNotLoad("answers in the harness's own batches have no time of their own", where="sample_seconds",
                                   hint="Leave sample_seconds out, or --exact")  # fmt: skip
        transformers.utils.logging.set_verbosity_error()
        with contextlib.suppress(AttributeError):
            transformers.utils.logging.disable_progress_bar()
        place = str(folder or spec.source)
        if not (Path(place) / "config.json").is_file():
            raise ModelDoesNotLoad(
                "the folder holds no config.json, so it is no Hugging Face model",
                where=place,
                hint="Export it with `unbroken checkpoint export --to huggingface --config-from FOLDER`, or name another folder",
            )
        settings: dict[str, Any] = {
            "dtype": _dtype(torch, spec.dtype),
            "trust_remote_code": bool(spec.options.get("trust_remote_code", False)),
            "local_files_only": True,
        }
        if "attn_implementation" in spec.options:
            settings["attn_implementation"] = spec.options["attn_implementation"]
        target = _target(torch, devices, spec)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                spec.tokenizer or place,
                trust_remote_code=settings["trust_remote_code"],
                local_files_only=True,
            )
            checked = (
                contextlib.nullcontext() if spec.options.get("allow_missing") else weights_checked(place)
            )
            with checked:
                model = _load(transformers, place, settings, target)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as e:
            if is_out_of_memory(torch, e):
                raise ModelDoesNotLoad(
                    f"the weights do not fit on {named(target)}", where=place,
                    hint="Give each worker more GPUs (gpus = ...), or a smaller dtype",
                ) from e  # fmt: skip
            raise _why(e, place) from e
        except Exception as e:
            # safetensors raises a class of its own that derives from Exception alone.
            if type(e).__module__.startswith("safetensors"):
                raise _why(e, place) from e
            raise
        exact = TransformersModel(spec, torch, transformers, model, tokenizer, target)
        return exact if spec.exact else FastModel(exact)


UNNEEDED = ("sklearn", "scipy", "torchvision", "torchaudio")
"""What transformers imports where it is installed, and no language model needs: for generation with an assistant model, and
for the losses and processors of images and sound."""


@contextlib.contextmanager
def quick_imports(unneeded: Sequence[str] = UNNEEDED) -> Iterator[None]:
    """Inside, garbage is not collected, and what is not needed is not found: two seconds more.

    transformers then takes those for missing in this process, for good.
    """
    hidden = [name for name in unneeded if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        with without_collecting():
            yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _load(transformers: Any, place: str, settings: dict[str, Any], target: Sequence[str]) -> Any:
    auto = transformers.AutoModelForCausalLM
    if target == ("cpu",):
        return auto.from_pretrained(place, **settings)
    if importlib.util.find_spec("accelerate") is None:
        if len(target) > 1:
            raise MissingExtra("accelerate", "eval", what="a model on several GPUs")
        return auto.from_pretrained(place, **settings).to(target[0])
    if len(target) == 1:
        # Straight from the mapped file to the device, with no second copy in host memory.
        return auto.from_pretrained(place, device_map={"": target[0]}, **settings)
    return auto.from_pretrained(place, device_map="balanced", **settings)


def _dtype(torch: Any, name: str) -> Any:
    if name == "auto":
        return "auto"
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise ModelDoesNotLoad(f"there is no dtype '{name}'", hint="Use auto, float32, bfloat16 or float16")
    return value


def _target(torch: Any, devices: Sequence[int], spec: ModelSpec) -> tuple[str, ...]:
    if not devices:
        # One thread: matrix products of several threads differ in their last bits with the number of threads.
        torch.set_num_threads(int(spec.options.get("threads", 1)))
        return ("cpu",)
    return _gpus(torch, devices)


def _gpus(torch: Any, devices: Sequence[int]) -> tuple[str, ...]:
    count = torch.cuda.device_count()
    if count < len(devices):
        raise ModelDoesNotLoad(
            f"{len(devices)} GPUs were given to this worker, but torch sees {count}",
            hint="Check the driver, CUDA_VISIBLE_DEVICES, and that torch is built for CUDA",
        )
    # The engine has hidden every other GPU from this process, and then they are numbered from 0.
    ids = range(count) if count == len(devices) else devices
    return tuple(f"cuda:{i}" for i in ids)


def _why(error: Exception, place: str) -> ModelDoesNotLoad:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    hint = "Check that the folder is a whole Hugging Face model (config, weights, tokenizer)"
    if "trust_remote_code" in str(error):
        hint = "Its code comes with it: set options.trust_remote_code = true if you trust it"
    return ModelDoesNotLoad(
        f"the model does not load: {type(error).__name__}: {text}", where=place, hint=hint
    )
