"""Weights of a Llama of Hugging Face, by the names that they have here, read one tensor at a time."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import InputError, UsageError
from ..config import ModelConfig
from .names import description

_SAME = {"rms_norm_eps": "--norm-eps", "num_attention_heads": "--heads", "num_key_value_heads": "--kv-heads",
         "rope_theta": "--rope-base"}  # fmt: skip
"""What no shape shows, and the option that it is here."""


class LlamaFolder:
    """A folder with config.json and safetensors. Raises InputError for what is none, UsageError for another model."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self._folder = folder
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as e:
            raise InputError(f"its config.json cannot be read: {e}", where=str(folder)) from e
        self._check(config, model)
        self._names: dict[str, str] = (description(model, 1) or {}).get("names", {})
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, "pt") as f:
                    self._files |= dict.fromkeys(f.keys(), file)
            except (OSError, SafetensorError) as e:
                raise InputError(f"its weights cannot be read: {e}", where=str(file)) from e
        if not self._files:
            raise InputError(
                "it has no safetensors", where=str(folder), hint="Save the model with save_pretrained"
            )

    @staticmethod
    def is_one(source: str) -> bool:
        """Whether a source is such a folder."""
        with contextlib.suppress(OSError):
            return "://" not in source and Path(source, "config.json").is_file()
        return False

    def shape(self, key: str) -> tuple[int, ...] | None:
        """The shape of a parameter; None where there is none."""
        name = self._name(key)
        if name is None:
            return None
        with safe_open(self._files[name], "pt") as f:
            return tuple(f.get_slice(name).get_shape())

    def read(self, key: str) -> Tensor:
        """A parameter, on the host."""
        name = self._name(key)
        assert name is not None, key
        with safe_open(self._files[name], "pt") as f:
            found: Tensor = f.get_tensor(name)
        return found

    def _name(self, key: str) -> str | None:
        name = self._names.get(key)
        if name == "lm_head.weight" and name not in self._files:
            name = self._names["embedding.weight"]  # shared there
        return name if name in self._files else None

    def _check(self, config: dict[str, Any], model: ModelConfig) -> None:
        if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
            raise UsageError(
                f"a model of type {config.get('model_type')} is not trained here", where=str(self._folder),
                hint="Llama without biases is; mixtures of experts have no such form",
            )  # fmt: skip
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise UsageError(f"its rotary positions are scaled ({rope['rope_type']}), these are not", where=str(self._folder))  # fmt: skip
        theirs = config | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})
        ours = {"rms_norm_eps": model.norm_eps, "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
                "rope_theta": model.rope_base}  # fmt: skip
        differ = [f"{_SAME[k]} {theirs[k]}" for k, v in ours.items() if k in theirs and theirs[k] != v]
        if differ:
            raise UsageError(
                "its model is another one", where=str(self._folder), hint=f"Give {' '.join(differ)}"
            )
