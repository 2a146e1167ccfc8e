"""A language model behind any OpenAI-compatible address (vLLM, llama.cpp, Ollama, a hosted one), and embeddings."""

from __future__ import annotations

import json
import os
import tomllib
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from ...errors import DiagnoseError, UnknownKey, UsageError, unreadable
from ...link.web import open_url, redirected

MOST_ANSWER = 1 << 20


class ChatModel(Protocol):
    """Answers a conversation with text."""

    def __call__(self, messages: Sequence[dict[str, str]], *, temperature: float = 0.7) -> str: ...


@dataclass(frozen=True)
class ModelConfig:
    """How to reach the model. `url` ends where `/chat/completions` is added (as in http://host:8000/v1); `key_env`
    names the variable that holds the key; `samples` answers of at most `max_tokens` are asked for and voted on; `budget_chars` bounds what
    is sent; `embedding` names a model for /embeddings, if incidents are to be found by meaning."""

    url: str
    name: str = "default"
    key_env: str = "UNBROKEN_MODEL_KEY"
    samples: int = 3
    timeout_s: float = 60.0
    max_tokens: int = 1500
    budget_chars: int = 24_000
    embedding: str = ""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(
                f"the model's address '{self.url}' is no http address", hint="Give it as http://host:port/v1"
            )
        if not 1 <= self.samples <= 15 or self.timeout_s <= 0 or self.budget_chars < 2000:
            raise UsageError(
                "samples must lie in 1 to 15, timeout_s above 0, budget_chars at 2000 or more",
                where="[model]",
            )


def configured(url: str | None = None, name: str | None = None) -> ModelConfig | None:
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
    known = {f.name for f in fields(ModelConfig)}
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
    return ModelConfig(**table)


class HttpModel:
    """The model at an address. Raises DiagnoseError where it does not answer in time or answers nonsense."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __call__(self, messages: Sequence[dict[str, str]], *, temperature: float = 0.7) -> str:
        answer = self._post("/chat/completions", {
            "model": self.config.name, "messages": list(messages), "temperature": temperature, "max_tokens": self.config.max_tokens, "stream": False,
        })  # fmt: skip
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise DiagnoseError("the model's answer has no choices", where=self.config.url) from None
        if not isinstance(content, str):
            raise DiagnoseError("the model's answer is no text", where=self.config.url)
        return content

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Vectors of the texts from the embedding model."""
        answer = self._post("/embeddings", {"model": self.config.embedding, "input": list(texts)})
        try:
            return [[float(x) for x in row["embedding"]] for row in answer["data"]]
        except (KeyError, TypeError, ValueError):
            raise DiagnoseError(
                "the embedding service's answer has no vectors", where=self.config.url
            ) from None

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.config.key_env)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            self.config.url.rstrip("/") + path, json.dumps(body).encode(), headers
        )
        hint = "Check the address and that the server is up; the verdict by rules stands without it"
        try:
            with open_url(request, self.config.timeout_s) as reply:
                data = reply.read(MOST_ANSWER + 1)
        except urllib.error.HTTPError as e:
            elsewhere = redirected(e)
            if elsewhere is not None:
                raise DiagnoseError(
                    f"the model's server redirects to {elsewhere}, and neither the key nor the log is sent on",
                    where=self.config.url,
                    hint="If that is the right server, give its address",
                ) from None
            raise DiagnoseError(
                f"the model's server answered {e.code} {e.reason}", where=self.config.url, hint=hint
            ) from None
        except (urllib.error.URLError, OSError, ValueError) as e:
            why = getattr(e, "reason", e)
            if isinstance(why, TimeoutError):
                raise DiagnoseError(
                    f"the model did not answer within {self.config.timeout_s:g} s",
                    where=self.config.url,
                    hint=hint,
                ) from None
            raise DiagnoseError(
                f"the model cannot be reached: {why}", where=self.config.url, hint=hint
            ) from None
        except Exception as e:
            if type(e).__module__ != "http.client":
                raise
            raise DiagnoseError(
                f"the model's server broke off: {type(e).__name__}", where=self.config.url, hint=hint
            ) from None
        if len(data) > MOST_ANSWER:
            raise DiagnoseError("the model's answer is larger than 1 MB", where=self.config.url)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise DiagnoseError(
                "the model's server did not answer with JSON", where=self.config.url, hint=hint
            ) from None
