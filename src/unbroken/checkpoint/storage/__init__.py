"""Where checkpoints lie: a POSIX folder or an object store, behind one small Protocol.

Names are relative to the storage's root, with "/": "step-00001200.a0003/rank-00000.safetensors". No operation
needs a rename across folders or a lock. Failures raise StorageError; a name that is not there raises
FileNotFoundError.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import UsageError
from .base import Storage


def quick_storage(url: str | Path) -> Storage:
    """As `open_storage`, for somebody who waits at a terminal: an object store that does not answer is given up soon."""
    if str(url).startswith("s3://"):
        from .s3 import S3Storage

        return S3Storage.from_url(str(url), retries=1, give_up_after=5.0, request_timeout=5.0)
    return open_storage(url)


def open_storage(url: str | Path) -> Storage:
    """The storage at a path, file:// or s3://bucket/prefix.

    Raises UsageError for another kind of address, MissingExtra without the library for object stores.
    """
    from .posix import PosixStorage

    text = str(url)
    if text.startswith("s3://"):
        from .s3 import S3Storage

        return S3Storage.from_url(text)
    if text.startswith("file://"):
        return PosixStorage(Path(text.removeprefix("file://")))
    if "://" in text:
        raise UsageError(
            f"'{text}' is no address that checkpoints can lie at", hint="Use a path or s3://bucket/prefix"
        )
    return PosixStorage(Path(text))
