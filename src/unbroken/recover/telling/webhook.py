"""A webhook, once an incident and at the end: sent behind the supervisor's back, and lost rather than waited for."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import UnsafeFile, UsageError
from ...private import read_secret

_log = logging.getLogger("unbroken.supervisor")
_WAITING_MOST = 64
_TRIES, _TIMEOUT_S, _PAUSE_S = 3, 10.0, 1.0
_FILE = Path("~/.config/unbroken/webhook")


def find_address(environment: Mapping[str, str] = os.environ) -> str:
    """Where to send: UNBROKEN_WEBHOOK, or what the file UNBROKEN_WEBHOOK_FILE (default ~/.config/unbroken/webhook) says; "" for
    nowhere. The address is a secret: whoever has it can post. Raises UnsafeFile where others can read the file, UsageError for
    what is no address."""
    address = environment.get("UNBROKEN_WEBHOOK", "").strip()
    if not address:
        named = environment.get("UNBROKEN_WEBHOOK_FILE", "")
        path = Path(named or _FILE).expanduser()
        try:
            address = read_secret(path).decode().strip()
        except FileNotFoundError:
            if named:
                raise UsageError("there is no such file", where=f"UNBROKEN_WEBHOOK_FILE={path}") from None
            return ""
    if address and urlsplit(address).scheme not in ("http", "https"):
        raise UsageError(
            "the webhook's address must begin with https:// or http://",
            hint="Its text is not shown: it is a secret",
        )
    return address


def open_webhook() -> Webhook | None:
    """The webhook that this user has asked for, None for none. What is wrong with it is logged, and no reason not to train."""
    try:
        address = find_address()
    except (UnsafeFile, UsageError, OSError, UnicodeDecodeError) as e:
        _log.warning("nobody will be told by webhook: %s", e)
        return None
    return Webhook(address) if address else None


class Webhook:
    """Sends in a thread of its own, oldest first; `post` returns at once, and drops what does not fit."""

    def __init__(self, address: str, *, pause_s: float = _PAUSE_S) -> None:
        self._address, self._pause_s = address, pause_s
        self._slack = (urlsplit(address).hostname or "").endswith("slack.com")
        self._waiting: queue.Queue[dict[str, Any]] = queue.Queue(_WAITING_MOST)
        self.sent = self.lost = 0
        threading.Thread(target=self._run, daemon=True, name="webhook").start()

    def post(self, message: dict[str, Any]) -> None:
        """Takes a message: `text` for people, and whatever else for programs."""
        try:
            self._waiting.put_nowait({"text": message["text"]} if self._slack else message)
        except queue.Full:
            self.lost += 1

    def drain(self, within_s: float) -> bool:
        """Waits until all is sent or lost; whether it was within that time."""
        until = time.monotonic() + within_s
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.02)
        return not self._waiting.unfinished_tasks

    def _run(self) -> None:
        while True:
            message = self._waiting.get()
            try:
                if self._send(json.dumps(message).encode()):
                    self.sent += 1
                else:
                    self.lost += 1
            finally:
                self._waiting.task_done()

    def _send(self, data: bytes) -> bool:
        for i in range(_TRIES):
            request = urllib.request.Request(
                self._address, data, {"Content-Type": "application/json", "User-Agent": "unbroken"}
            )
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                    return True
            except urllib.error.HTTPError as e:
                why, again = f"it answers {e.code}", e.code >= 500 or e.code == 429
            except (OSError, ValueError) as e:
                why, again = type(e).__name__, True  # its text may have the address in it
            if not again:
                break
            time.sleep(self._pause_s * 2**i)
        _log.warning("a message by webhook was lost: %s", why)
        return False
