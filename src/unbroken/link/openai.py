"""The one client of OpenAI-compatible endpoints (vLLM, SGLang, TGI, llama.cpp, Ollama, a hosted one) and its one retry.

    endpoint, retry = Endpoint("http://host:8000/v1", "model"), Retry(attempts=3)
    text = retry(lambda attempt: endpoint.chat([{"role": "user", "content": "hello"}]))

`Endpoint` makes one call, on a connection that each thread keeps; `Retry` tries again what may pass. With the standard
library alone: a diagnosis asks a model on machines where nothing may be installed, and what lies below the parts that
run on a GPU image brings no library of its own. Proxies are those of the environment (HTTPS_PROXY, NO_PROXY).
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import json
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ..errors import UsageError
from ..units import Bytes

Json = Any
T = TypeVar("T")

LONGEST_REPLY = 256 << 20


class EndpointRefused(Exception):
    """A call failed. `again`: it may succeed later; `retry_after`: seconds that the endpoint asked to wait, 0 for at
    once; `status`: of the HTTP reply, 0 where there was none; `unreachable`: nobody answered, or not in time."""

    def __init__(
        self, why: str, *, again: bool, retry_after: float | None = None, status: int = 0, unreachable: bool = False
    ) -> None:  # fmt: skip
        super().__init__(why)
        self.again = again
        self.retry_after = retry_after
        self.status = status
        self.unreachable = unreachable


@dataclass
class Retry:
    """Tries a call again while it may pass: with pauses that double, are never equal, and obey `Retry-After`."""

    attempts: int = 6
    sleep: Callable[[float], None] = time.sleep
    unreachable: bool = True
    """Also where nobody answers, or not in time."""
    longest_s: float = 300.0
    """No pause is longer; an endpoint that asks for a longer one is tried after this."""
    random: random.Random = field(default_factory=lambda: random.Random(os.getpid()), repr=False)

    def __call__(self, ask: Callable[[int], T]) -> T:
        """What `ask` returns, which is given the attempt's number from 0. Raises EndpointRefused, which says how often
        it was tried."""
        for attempt in range(self.attempts):
            try:
                return ask(attempt)
            except EndpointRefused as e:
                again = e.again and (self.unreachable or not e.unreachable)
                if not again or attempt + 1 == self.attempts:
                    raise EndpointRefused(
                        f"{e} (attempt {attempt + 1} of {self.attempts})", again=e.again, retry_after=e.retry_after,
                        status=e.status, unreachable=e.unreachable,
                    ) from e  # fmt: skip
                self.sleep(self._pause(attempt, e.retry_after))
        raise ValueError(f"{self.attempts} attempts")

    def _pause(self, attempt: int, asked: float | None) -> float:
        if asked == 0.0:
            return 0.0
        own: float = min(60.0, 0.5 * 2**attempt) * (0.5 + self.random.random())
        return min(self.longest_s, max(own, asked or 0.0))


class Endpoint:
    """A base URL (with or without /v1) and a model's name there. Safe to use from many threads.

    `key_env` names the variable that holds the key; a reply of more than `longest` bytes is refused.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        timeout_s: float = 600.0,
        key_env: str = "OPENAI_API_KEY",
        longest: int = LONGEST_REPLY,
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
        self._longest = longest
        self._local = threading.local()

    def models(self) -> list[Json]:
        """What the endpoint says that it serves."""
        reply = self._call("GET", "/models", None)
        served = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(served, list) or not all(isinstance(m, dict) for m in served):
            raise EndpointRefused(f"a reply without models: {str(reply)[:200]}", again=False)
        return served

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
        if not isinstance(content, str):
            raise EndpointRefused(f"a message that is no text: {str(content)[:200]}", again=True)
        return content

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

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector of each text."""
        reply = self._call("POST", "/embeddings", {"model": self.model, "input": list(texts)})
        try:
            return [[float(x) for x in row["embedding"]] for row in reply["data"]]
        except (KeyError, TypeError, ValueError) as e:
            raise EndpointRefused(f"a reply without vectors: {str(reply)[:200]}", again=False) from e

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
            # A kept connection that the server had closed meanwhile is no failure of the call: once more, on a new one.
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
            return EndpointRefused(f"no answer from {where} in {self._timeout:g} s", again=True, unreachable=True)  # fmt: skip
        if isinstance(error, socket.gaierror):
            return EndpointRefused(f"there is no host {self._host}: {error.strerror}", again=False, unreachable=True)  # fmt: skip
        if isinstance(error, ssl.SSLCertVerificationError):
            return EndpointRefused(
                f"the certificate of {where} is not trusted: {error.verify_message}", again=False, unreachable=True
            )  # fmt: skip
        return EndpointRefused(f"cannot reach {where}: {error}", again=True, unreachable=True)

    def _connect(self) -> tuple[http.client.HTTPConnection, str]:
        """A connection, through the environment's proxy where there is one, and what stands before each path on it."""
        scheme, port = ("https", self._port or 443) if self._tls else ("http", self._port or 80)
        proxy = None if proxy_bypass(f"{self._host}:{port}") else getproxies().get(scheme)
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        if not proxy:
            return kind(self._host, self._port, timeout=self._timeout), ""
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        who = {}
        if via.username:
            pair = f"{unquote(via.username)}:{unquote(via.password or '')}"
            who = {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
        connection = kind(via.hostname or "", via.port, timeout=self._timeout)
        if self._tls:
            connection.set_tunnel(self._host, port, who)
            return connection, ""
        self._local.proxy_headers = who
        host = f"[{self._host}]" if ":" in self._host else self._host
        return connection, f"http://{host}:{port}"

    def _once(self, method: str, path: str, body: Json) -> Json:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            self._local.proxy_headers = {}
            connection, self._local.before = self._connect()
            self._local.connection = connection
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            **self._local.proxy_headers,
        }
        key = os.environ.get(self._key_env, "").strip()
        if not key.isascii() or not key.isprintable():  # a header's own error would show it
            raise EndpointRefused(f"what {self._key_env} holds is no key: it has line breaks or odd characters", again=False)  # fmt: skip
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, self._local.before + self._path + path, body=data, headers=headers)
        response = connection.getresponse()
        text = response.read(self._longest + 1)
        if response.will_close or not response.isclosed():  # not all of it was read: cut off, or too long
            self.close()
        if response.status >= 300:  # a redirect is not followed: the key is for this host
            raise _refused(response.status, text, response.headers)
        if len(text) > self._longest:
            raise EndpointRefused(f"a reply larger than {Bytes(self._longest)}", again=False)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as e:
            raise EndpointRefused(f"a reply that is no JSON: {text[:200]!r}", again=True) from e


def _refused(status: int, text: bytes, headers: Message) -> EndpointRefused:
    if status < 400:
        to = urlsplit(headers.get("Location") or "")
        # The rest of the address may hold a key.
        there = f"{to.scheme}://{to.hostname}" if to.hostname else "another address"
        return EndpointRefused(
            f"HTTP {status}: it redirects to {there}, where neither the key nor what is asked is sent; if that is the right server, give its address",
            again=False, status=status,
        )  # fmt: skip
    try:
        error = json.loads(text).get("error", {})
        said = error.get("message") if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, RecursionError):
        said = text[:200].decode(errors="replace")
    again = status in (408, 409, 425, 429) or status >= 500
    # An account without credit answers 429 for ever.
    if status == 429 and "insufficient_quota" in text.decode(errors="replace"):
        again = False
    return EndpointRefused(
        f"HTTP {status}: {said}"[:400],
        again=again,
        retry_after=_seconds(headers.get("Retry-After")),
        status=status,
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
