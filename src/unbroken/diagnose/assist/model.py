"""A language model behind any OpenAI-compatible address (vLLM, llama.cpp, Ollama, a hosted one), and embeddings."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...errors import DiagnoseError, UnknownKey, UsageError, unreadable
from ...link.openai import Endpoint, EndpointRefused, Retry

LONGEST_ANSWER = 1 << 20
T = TypeVar("T")


class ChatModel(Protocol):
    """Answers a conversation with text."""

    def __call__(self, messages: Sequence[dict[str, str]], *, temperature: float = 0.7) -> str: ...


@dataclass(frozen=True)
class AssistantConfig:
    """How to reach the model. `url` ends where `/chat/completions` is added (as in http://host:8000/v1, which is also
    what is meant where it has no path); `key_env` names the variable that holds the key; `samples` answers of at most
    `max_tokens` are asked for and voted on, each up to `attempts` times while the server is busy; `budget_chars` bounds
    what is sent; `embedding` names a model for /embeddings, if incidents are to be found by meaning."""

    url: str
    name: str = "default"
    key_env: str = "UNBROKEN_MODEL_KEY"
    samples: int = 3
    timeout_s: float = 60.0
    max_tokens: int = 1500
    budget_chars: int = 24_000
    attempts: int = 3
    embedding: str = ""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(
                f"the model's address '{self.url}' is no http address", hint="Give it as http://host:port/v1"
            )
        if not (
            1 <= self.samples <= 15
            and 1 <= self.attempts <= 15
            and self.timeout_s > 0
            and self.budget_chars >= 2000
        ):
            raise UsageError(
                "samples and attempts must lie in 1 to 15, timeout_s above 0, budget_chars at 2000 or more",
                where="[model]",
            )


def configured(url: str | None = None, name: str | None = None) -> AssistantConfig | None:
    """The model's configuration from the command line, `UNBROKEN_MODEL_URL` and `UNBROKEN_MODEL_NAME`, or the
    `[model]` table of `~/.config/unbroken/diagnose.toml`; None where none is given."""
    table: dict[str, Any] = {}
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    file = Path(home) / "unbroken" / "diagnose.toml"
    if file.is_file():
        try:
            table = tomllib.loads(file.read_text()).get("model", {})
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise UsageError(f"cannot read the configuration: {unreadable(e)}", where=str(file)) from None
    known = {f.name for f in fields(AssistantConfig)}
    for key in table:
        if key not in known:
            raise UnknownKey(key, known, where=f"{file} [model]")
    address = url or os.environ.get("UNBROKEN_MODEL_URL") or table.get("url")
    if not address:
        return None
    table["url"] = address
    chosen = name or os.environ.get("UNBROKEN_MODEL_NAME")
    if chosen:
        table["name"] = chosen
    return AssistantConfig(**table)


class ModelUnreachable(DiagnoseError):
    """Nobody answers at the model's address, or not in time: asking again is of no use now."""


class HttpModel:
    """The model at an address. Raises DiagnoseError where it does not answer in time or answers nonsense."""

    def __init__(self, config: AssistantConfig) -> None:
        self.config = config
        # Whoever waits for a diagnosis waits for a busy server, not for one that is gone.
        self.retry = Retry(config.attempts, unreachable=False, longest_s=config.timeout_s)

    def __call__(self, messages: Sequence[dict[str, str]], *, temperature: float = 0.7) -> str:
        return self._ask(
            self.config.name,
            lambda e: e.chat(
                messages, temperature=temperature, max_tokens=self.config.max_tokens, stream=False
            ),
        )

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Vectors of the texts from the embedding model."""
        return self._ask(self.config.embedding, lambda e: e.embed(texts))

    def _ask(self, model: str, ask: Callable[[Endpoint], T]) -> T:
        config = self.config
        endpoint = Endpoint(
            config.url, model, timeout_s=config.timeout_s, key_env=config.key_env, longest=LONGEST_ANSWER
        )
        try:
            return self.retry(lambda attempt: ask(endpoint))
        except EndpointRefused as e:
            kind = ModelUnreachable if e.unreachable else DiagnoseError
            raise kind(
                f"the model gave no answer: {e}",
                where=config.url,
                hint="Check the address and that the server is up; the verdict by rules stands without it",
            ) from None
        finally:
            endpoint.close()
