"""Calls to an OpenAI-compatible endpoint (vLLM, SGLang, TGI, llama.cpp, ...), with the standard library alone.

One call, one connection kept per thread, no retries here: whoever calls knows whether to try again, from
`EndpointRefused.again` and `.retry_after`.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ...errors import UsageError

Json = Any


class EndpointRefused(Exception):
    """A call failed. `again`: it may succeed later; `retry_after`: seconds that the endpoint asked to wait."""

    def __init__(self, why: str, *, again: bool, retry_after: float | None = None, status: int = 0) -> None:
        super().__init__(why)
        self.again = again
        self.retry_after = retry_after
        self.status = status


class Endpoint:
    """A base URL (with or without /v1) and a model's name there. Safe to use from many threads."""

    def __init__(
        self, url: str, model: str, *, timeout_s: float = 600.0, key_env: str = "OPENAI_API_KEY"
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"'{url}' is no http address", hint="Write it as http://host:port/v1")
        self.url = url
        self.model = model
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        path = parts.path.rstrip("/")
        for tail in ("/chat/completions", "/completions"):
            path = path.removesuffix(tail)
        self._path = path or "/v1"
        self._timeout = timeout_s
        self._key_env = key_env
        self._local = threading.local()

    def models(self) -> list[Json]:
        """What the endpoint says that it serves."""
        return list(self._call("GET", "/models", None).get("data", []))

    def chat(self, messages: Sequence[Mapping[str, str]], **settings: Json) -> str:
        """The text of one chat completion."""
        body = {"model": self.model, "messages": list(messages), **settings}
        reply = self._call("POST", "/chat/completions", body)
        try:
            content = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as e:
            raise EndpointRefused(f"a reply without a message: {str(reply)[:200]}", again=True) from e
        if content is None:
            reason = reply["choices"][0].get("finish_reason")
            raise EndpointRefused(f"an empty message (finish_reason {reason})", again=True)
        return str(content)

    def complete(self, prompt: Json, **settings: Json) -> list[Json]:
        """The choices of one completion call, in the order of its prompts."""
        reply = self._call("POST", "/completions", {"model": self.model, "prompt": prompt, **settings})
        try:
            choices = sorted(reply["choices"], key=lambda c: int(c["index"]))
        except (KeyError, TypeError, ValueError) as e:
            raise EndpointRefused(f"a reply without choices: {str(reply)[:200]}", again=True) from e
        if not choices:
            raise EndpointRefused("a reply without choices", again=True)
        return choices

    def close(self) -> None:
        """Closes this thread's connection."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    def _call(self, method: str, path: str, body: Json) -> Json:
        fresh = getattr(self._local, "connection", None) is None
        try:
            return self._once(method, path, body)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as e:
            self.close()
            if fresh:
                raise EndpointRefused(f"the connection broke: {e}", again=True) from e
            # A kept connection that the server had closed meanwhile is no failure of the call: once more, anew.
        except (TimeoutError, OSError, http.client.HTTPException) as e:
            raise self._failed(e) from e
        try:
            return self._once(method, path, body)
        except (OSError, http.client.HTTPException) as e:
            raise self._failed(e) from e

    def _failed(self, error: Exception) -> EndpointRefused:
        self.close()
        where = f"{self._host}:{self._port or (443 if self._tls else 80)}"
        if isinstance(error, TimeoutError):
            return EndpointRefused(f"no answer from {where} in {self._timeout:g} s", again=True)
        if isinstance(error, socket.gaierror):
            return EndpointRefused(f"there is no host {self._host}: {error.strerror}", again=False)
        if isinstance(error, ssl.SSLCertVerificationError):
            return EndpointRefused(
                f"the certificate of {where} is not trusted: {error.verify_message}", again=False
            )
        return EndpointRefused(f"cannot reach {where}: {error}", again=True)

    def _once(self, method: str, path: str, body: Json) -> Json:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
            connection = kind(self._host, self._port, timeout=self._timeout)
            self._local.connection = connection
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        key = os.environ.get(self._key_env, "")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, self._path + path, body=data, headers=headers)
        response = connection.getresponse()
        text = response.read()
        if response.will_close:
            self.close()
        if response.status >= 300:  # a redirect is not followed: the key is for this host
            raise _refused(response.status, text, response.headers.get("Retry-After"))
        try:
            return json.loads(text)
        except ValueError as e:
            raise EndpointRefused(f"a reply that is no JSON: {text[:200]!r}", again=True) from e


def _refused(status: int, text: bytes, retry_after: str | None) -> EndpointRefused:
    try:
        error = json.loads(text).get("error", {})
        said = error.get("message") if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        said = text[:200].decode(errors="replace")
    again = status in (408, 409, 425, 429) or status >= 500
    # An account without credit answers 429 for ever.
    if status == 429 and "insufficient_quota" in text.decode(errors="replace"):
        again = False
    return EndpointRefused(
        f"HTTP {status}: {said}"[:400], again=again, retry_after=_seconds(retry_after), status=status
    )


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After` as seconds: a number, or a date."""
    if not retry_after:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass  # not a number: a date
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
