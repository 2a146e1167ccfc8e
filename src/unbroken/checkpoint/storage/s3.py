"""Checkpoints in S3 and whatever speaks its language, through obstore (the Rust crate `object_store`).

An object store has no rename and no fsync: an object appears whole when its last request succeeds, and is durable
then. Large files go up in parts, several at once, each with its own SHA-256 that the server checks, each retried
with exponential back-off and jitter after 5xx (SlowDown included), resets and time-outs. The commit marker is
created with `If-None-Match: *`, so one of several writers wins.

A writer that dies leaves no object, but parts that the bucket keeps: give it a lifecycle rule that aborts
incomplete multipart uploads after a day.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ...errors import MissingExtra, StorageError, UsageError
from ...link.web import points_elsewhere
from .base import Buffer, Entry, probe

_PART = 16 * 2**20
_MAX_PARTS = 9_000  # S3 allows 10,000
_RANGE = 16 * 2**20
_CREATE_TRIES = 6
_HINT = {
    "PermissionDeniedError": "Check the credentials and the bucket's policy",
    "UnauthenticatedError": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the node a role",
    "NotSupportedError": "The store must support conditional PUT (If-None-Match); without it no commit is safe",
}


class S3Storage:
    """Storage under a prefix of a bucket. `store` is any obstore store whose root is that prefix."""

    level = "remote"

    def __init__(
        self, store: Any, url: str, *, part_bytes: int = _PART, concurrency: int = 8, endpoint: str = ""
    ) -> None:
        self._endpoint = endpoint
        """The bucket's address where the user gave an endpoint of their own."""
        self.store = store
        self.url = url
        self.part_bytes = part_bytes
        self.concurrency = concurrency

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        options: Mapping[str, Any] | None = None,
        retries: int = 12,
        give_up_after: float = 150.0,
        request_timeout: float = 120.0,
        **more: Any,
    ) -> S3Storage:
        """The storage at s3://bucket/prefix. Credentials, region and AWS_ENDPOINT_URL come from the environment.

        A request is retried up to `retries` times within `give_up_after` seconds; one that takes longer than
        `request_timeout` seconds counts as failed. `options` are obstore's for S3. Raises UsageError for an
        address without a bucket, MissingExtra without obstore.
        """
        obstore = _obstore()
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not bucket or not url.startswith("s3://"):
            raise UsageError(f"'{url}' names no bucket", hint="Write it as s3://bucket/prefix")
        config = {"checksum_algorithm": "SHA256", **(options or {})}
        endpoint = str(config.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL") or "")
        if endpoint:
            config["endpoint"] = endpoint
        if "region" not in config and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(os.environ):
            config["region"] = "us-east-1"
        store = obstore.store.S3Store(
            bucket,
            prefix=prefix.strip("/") or None,
            config=config,
            client_options={
                "timeout": timedelta(seconds=request_timeout),
                "connect_timeout": timedelta(seconds=min(10.0, request_timeout)),
                "allow_http": endpoint.startswith("http://"),
            },
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=give_up_after),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=15),
                    "base": 2,
                },
            },
        )
        return cls(
            store, url.rstrip("/"), endpoint=f"{endpoint.rstrip('/')}/{bucket}" if endpoint else "", **more
        )

    def check(self) -> None:
        """Raises StorageError unless a commit is possible and safe here."""
        refuse_redirects(self._endpoint, self.url)
        probe(self)

    def folders(self) -> list[str]:
        """The names of the common prefixes at the root, sorted."""
        with self._errors(""):
            found = _obstore().list_with_delimiter(self.store)["common_prefixes"]
            return sorted(p.strip("/").rsplit("/", 1)[-1] for p in found)

    def files(self, folder: str) -> list[Entry]:
        """The objects of one folder, sorted by name."""
        with self._errors(folder):
            found = _obstore().list_with_delimiter(self.store, f"{folder}/")["objects"]
            entries = (
                Entry(o["path"].rsplit("/", 1)[-1], o["size"], o["last_modified"].timestamp()) for o in found
            )
            return sorted(entries, key=lambda e: e.name)

    def list(self, folder: str) -> list[str]:
        """The names of `files(folder)`."""
        return [e.name for e in self.files(folder)]

    def size(self, name: str) -> int:
        """The length of an object."""
        with self._errors(name):
            return int(_obstore().head(self.store, name)["size"])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of an object."""
        end = self.size(name) if stop is None else stop
        data = bytearray(max(0, end - start))
        self.read_into(name, start, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, start: int, into: memoryview, *, once: bool = False) -> None:
        """Fills `into`, by several ranges at once; raises StorageError if the object is shorter."""
        if not len(into):
            self.size(name)
            return
        places = [(at, min(at + _RANGE, len(into))) for at in range(0, len(into), _RANGE)]

        def fetch(place: tuple[int, int]) -> None:
            low, high = place
            with self._errors(name):
                data = memoryview(_obstore().get_range(self.store, name, start=start + low, end=start + high))
            if len(data) != high - low:
                raise StorageError(f"the object ends before byte {start + high}", where=f"{self.url}/{name}")
            into[low:high] = data

        if len(places) == 1:
            fetch(places[0])
            return
        with ThreadPoolExecutor(max_workers=min(self.concurrency, len(places))) as pool:
            for _ in pool.map(fetch, places):
                pass

    def write(self, name: str, chunks: Iterable[Buffer], size: int) -> None:
        """Uploads an object of `size` bytes, in parts where it is larger than one."""
        part = max(self.part_bytes, -(-size // _MAX_PARTS))
        with self._errors(name):
            if size <= part:
                data = b"".join(_counted(chunks, size))
                _obstore().put(self.store, name, data, use_multipart=False)
                return
            _obstore().put(
                self.store, name, _counted(chunks, size), use_multipart=True, chunk_size=part,
                max_concurrency=self.concurrency,
            )  # fmt: skip

    def put(self, name: str, data: Buffer) -> None:
        """Writes or replaces a small object."""
        with self._errors(name):
            _obstore().put(self.store, name, bytes(data), use_multipart=len(data) > 2**30)

    def create(self, name: str, data: Buffer) -> bool:
        """Creates an object with `If-None-Match: *`; False if another one is there already.

        Not repeated blindly: after an error, what is there decides. If the answer to a try that succeeded was
        lost, it is ours.
        """
        obstore, wanted = _obstore(), bytes(data)
        for attempt in range(_CREATE_TRIES):
            try:
                with self._errors(name):
                    obstore.put(self.store, name, wanted, mode="create", use_multipart=False)
                return True
            except FileExistsError:
                return self.read(name) == wanted
            except StorageError as e:
                if attempt == _CREATE_TRIES - 1 or type(e.__cause__).__name__ in _HINT:
                    raise
                time.sleep(random.uniform(0.5, 1.0) * 0.2 * 2**attempt)
        raise AssertionError("unreachable")

    def delete(self, name: str) -> None:
        """Removes an object; no error if it is not there."""
        try:
            with self._errors(name):
                _obstore().delete(self.store, name)
        except FileNotFoundError:
            return

    def delete_folder(self, folder: str) -> None:
        """Removes all objects of a folder, the commit marker first."""
        self.delete(f"{folder}/COMMITTED")
        with self._errors(folder):
            found = [o["path"] for page in _obstore().list(self.store, f"{folder}/") for o in page]
            if found:
                _obstore().delete(self.store, found)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turns the library's errors into StorageError; FileNotFoundError and FileExistsError pass."""
        exceptions = _obstore().exceptions
        try:
            yield
        except exceptions.AlreadyExistsError:
            raise FileExistsError(name) from None
        except exceptions.PreconditionError:
            raise FileExistsError(name) from None
        except exceptions.BaseError as e:
            what = " ".join(str(e).split("\n\nDebug source")[0].split())
            raise StorageError(
                what[:400], where=f"{self.url}/{name}", hint=_HINT.get(type(e).__name__)
            ) from e
        except OSError as e:
            if isinstance(e, FileNotFoundError):
                raise FileNotFoundError(f"{self.url}/{name}") from None
            raise StorageError(str(e), where=f"{self.url}/{name}") from e


def _counted(chunks: Iterable[Buffer], size: int) -> Iterator[bytes | memoryview]:
    """The chunks, proven to be `size` bytes in all before the last one is handed on."""
    at, held = 0, None
    for chunk in chunks:
        if held is not None:
            yield held
        held = memoryview(chunk).cast("B")
        at += len(held)
    if at != size:
        raise ValueError(f"{at} bytes came, {size} were announced")
    yield b"" if held is None else held


def refuse_redirects(address: str, where: str) -> None:
    """Raises StorageError if an endpoint of the user's own points reads to another host.

    obstore follows such redirects, with the session token's header, and has no switch for that; so it is asked first,
    without credentials.
    """
    to = points_elsewhere(address) if address.startswith(("http://", "https://")) else None
    if to is not None:
        raise StorageError(
            f"the endpoint sends readers on to {to}, and credentials are for the host that you named",
            where=where,
            hint=f"Set AWS_ENDPOINT_URL to {to}, if that is the store that you mean",
        )


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise MissingExtra("obstore", "s3", what="a checkpoint folder in an object store") from None
    return obstore
