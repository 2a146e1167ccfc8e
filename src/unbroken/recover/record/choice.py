"""Which record a run has, by what was asked for."""

from __future__ import annotations

from ...errors import UsageError
from ...progress import RunDir
from .base import Record
from .folder import FolderRecord, is_shared
from .objects import ObjectRecord

_RETRIES, _GIVE_UP_S, _REQUEST_S = 3, 8.0, 5.0
"""An append that fails is tried again by whoever waits for it: each try is short, and says early that it failed."""


def check_record(text: str) -> str:
    """The same text. Raises UsageError where it names no place for a record."""
    if text not in ("auto", "shared", "own-disk") and not text.startswith("s3://"):
        raise UsageError(
            f"'{text}' is no place for the record of a run",
            hint="Write --record s3://bucket/prefix, shared (the run directory, which other hosts have too) or own-disk",
        )
    return text


def open_record(run_dir: RunDir, text: str) -> Record:
    """The record that `--record` names. Raises UsageError, MissingExtra without the library for object stores."""
    check_record(text)
    if text.startswith("s3://"):
        from ...checkpoint.storage.s3 import S3Storage

        storage = S3Storage.from_url(
            text, retries=_RETRIES, give_up_after=_GIVE_UP_S, request_timeout=_REQUEST_S
        )
        return ObjectRecord(storage, run_dir)
    return FolderRecord(run_dir, shared=text == "shared" or (text == "auto" and is_shared(run_dir.path)))
