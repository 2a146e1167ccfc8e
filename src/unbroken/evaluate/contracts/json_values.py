"""JSON values, and the hash of one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

Json = Any
"""What `json.dumps` takes: str, int, float, bool, None, lists and dictionaries of these."""


def digest(value: Json) -> str:
    """32 hex digits of the SHA-256 of a JSON value, with sorted keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
