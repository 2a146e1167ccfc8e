"""Chat templates, and what a backend can be asked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import EvaluationError, MissingExtra
from ..contracts import ModelSpec
from ..suite.registry import get_backend


def chat_of(spec: ModelSpec, model_files: Path | None) -> Any:
    """The chat template of a model: (history, add_generation_prompt) -> prompt.

    A backend may bring its own (`backend.chat(spec, model_files)`: an endpoint takes the messages as they are); else
    it is the one of the tokenizer in `spec.tokenizer` or `model_files`. Raises EvaluationError where there is none.
    """
    own = getattr(get_backend(spec.backend), "chat", None)
    if own is not None:
        return own(spec, model_files)
    folder = spec.tokenizer or (str(model_files) if model_files else "")
    if not folder:
        raise EvaluationError(
            "chat_template is on, but there is no tokenizer to take it from",
            where=spec.source,
            hint="Name the tokenizer's folder with tokenizer = ...",
        )
    return tokenizer_chat(folder, dict(spec.options.get("chat_template_args", {})))


def tokenizer_chat(folder: str, more: dict[str, Any]) -> Any:
    """The template of a Hugging Face tokenizer, applied as lm_eval's `hf` model does. Raises EvaluationError."""
    try:
        import jinja2
        from transformers import AutoTokenizer
    except ModuleNotFoundError as e:
        raise MissingExtra(e.name or "transformers", "eval", what="a chat template") from e
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as e:
        raise EvaluationError(
            f"the tokenizer does not load: {str(e).splitlines()[0]}",
            where=folder,
            hint="Name a folder with a tokenizer with tokenizer = ...",
        ) from e
    if not tokenizer.chat_template:
        raise EvaluationError(
            "chat_template is on, but the tokenizer has none",
            where=folder,
            hint="Set chat_template = false, or use the tokenizer of a chat model",
        )

    def render(history: list[dict[str, str]], add_generation_prompt: bool) -> str:
        settings: dict[str, Any] = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **more,
        }
        try:
            return str(tokenizer.apply_chat_template(history, **settings))
        except jinja2.exceptions.TemplateError:
            # Some templates refuse a system turn; lm_eval then leaves it out, and so do we.
            rest = [m for m in history if m["role"] != "system"]
            return str(tokenizer.apply_chat_template(rest, **settings))

    return render


def check_kinds(spec: ModelSpec, kinds: Iterable[str], task: str) -> None:
    """Raises EvaluationError where the backend cannot answer such requests; said before a GPU is taken."""
    can = getattr(get_backend(spec.backend), "kinds", None)
    if can is None:
        return
    known = can(spec)
    missing = sorted(k for k in kinds if k not in known)
    if missing:
        raise EvaluationError(
            f"task '{task}' asks for {', '.join(missing)}, which this model cannot answer: it takes "
            f"{', '.join(sorted(known))}",
            where=f"backend '{spec.backend}', {spec.source}",
            hint="Leave the task out, or serve the model where log-probabilities are given",
        )
