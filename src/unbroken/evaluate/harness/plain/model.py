"""What infer.py gets: a handle on the backend's model, or a model that it loads itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....errors import ModelDoesNotLoad
from ...contracts import Conditions, Json, Model, ModelSpec, Request
from ...suite.asking import partial_of, problem_of
from .folder import Folder, settings_of


class Unanswered(Exception):
    """The model gave no answer to a call of `infer`; its row is asked again in the next run."""


class Handle:
    """What `infer(model, rows)` gets: the backend's model with plain calls."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        max_tokens: int = 256,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
    ) -> list[str]:
        """One continuation per prompt (text or chat messages)."""
        settings = settings_of({"max_tokens": max_tokens, "stop": list(stop), "temperature": temperature})
        outputs = self._ask([Request("generate_until", (p, settings)) for p in prompts])
        return [str(o["text"] if partial_of(o) else o) for o in outputs]

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log-probability, is it the greedy one) of each continuation after its context."""
        outputs = self._ask([Request("loglikelihood", (a, b)) for a, b in pairs])
        return [(float(o[0]), bool(o[1])) for o in outputs]

    def _ask(self, requests: Sequence[Request]) -> list[Json]:
        outputs = self.model.respond(requests)
        for o in outputs:
            if why := problem_of(o):
                raise Unanswered(why)
        return outputs


class PlainBackend:
    """Models that infer.py loads itself: `--backend unbroken.evaluate.harness.plain:PlainBackend`.

    `options.infer` names the file, which defines `load(folder, devices)` and `infer(model, rows)`; it is loaded once
    per worker and kept for every task whose infer.py defines `infer`.
    """

    needs_weights = True
    options = ("infer", "chat_template_args")

    def fingerprint(self, spec: ModelSpec) -> str | None:
        """None: the files of the folder are hashed."""
        return None

    def load(self, spec: ModelSpec, folder: Path | None, devices: Sequence[int]) -> PlainModel:
        """What `load` returns, in a PlainModel. Raises ModelDoesNotLoad."""
        file = Path(str(spec.options.get("infer", "")))
        if not file.is_file():
            raise ModelDoesNotLoad(
                "there is no infer.py to load the model with",
                where=str(file),
                hint="Name it in options.infer",
            )
        module = Folder(file.resolve().parent).load(file.stem)
        try:
            loaded = module.load(str(folder or spec.source), list(devices))
        except Exception as e:
            raise ModelDoesNotLoad(f"load() raised {type(e).__name__}: {e}", where=str(file)) from e
        return PlainModel(spec, module, loaded, devices)


class PlainModel:
    """A model of the user's own; it answers 'plain' requests only."""

    def __init__(self, spec: ModelSpec, module: Any, loaded: Any, devices: Sequence[int]) -> None:
        self._spec, self._module, self._loaded = spec, module, loaded
        self._batch = spec.batch_size
        self._device = f"gpu {','.join(map(str, devices))}" if devices else "cpu"

    def respond(self, requests: Sequence[Request]) -> list[Json]:
        """Calls `infer` with at most `batch_size` rows at a time."""
        out: list[Json] = []
        for at in range(0, len(requests), self._batch):
            out += self._module.infer(self._loaded, [r.arguments[0] for r in requests[at : at + self._batch]])
        return out

    def halve(self) -> bool:
        """Halves the rows per call."""
        if self._batch <= 1:
            return False
        self._batch //= 2
        return True

    def restore(self) -> None:
        """Back to what was asked for."""
        self._batch = self._spec.batch_size

    @property
    def conditions(self) -> Conditions:
        """What is recorded beside the score."""
        return Conditions("plain", self._device, self._spec.dtype, self._batch)

    def close(self) -> None:
        """Drops the model."""
        self._loaded = None
