"""A small S3 server in this process, for tests, with faults to order: SlowDown, resets, slow parts, lost answers.

    with FakeS3() as s3:
        storage = s3.storage("bucket/run")
        s3.fault = lambda r: SLOW_DOWN if r.number % 3 == 0 else None

It speaks what a checkpoint needs: objects with ranges and `If-None-Match: *`, multipart uploads, SHA-256 checksums
(a wrong one is refused), listings and deletes. It holds everything in memory and checks no signatures.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from xml.sax.saxutils import escape

from ..checkpoint.storage.s3 import S3Storage
from .http_faults import RESET, SLOW_DOWN, Fault, FaultyHandler, FaultyServer, HttpRequest

__all__ = ["RESET", "SLOW_DOWN", "FakeS3", "Fault", "HttpRequest"]


class _Handler(FaultyHandler):
    def respond(self, request: HttpRequest, body: bytes) -> None:
        getattr(self, f"_{self.command.lower()}")(request.key, request.query, body)

    def _get(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "list-type" in query:
            return self._list(key.strip("/"), query)
        with self.owner.lock:
            data, modified = self.owner.objects.get(key), self.owner.modified.get(key, 0.0)
        if data is None:
            return self.refuse(404, "NoSuchKey")
        headers = {
            "ETag": f'"{hashlib.md5(data).hexdigest()}"',
            "Last-Modified": formatdate(modified, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span:
            low, high = int(span[1]), min(int(span[2]) + 1, len(data))
            if low >= len(data):
                return self.refuse(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {low}-{high - 1}/{len(data)}"
            return self.answer(206, data[low:high], headers)
        return self.answer(200, data, headers)

    _head = _get

    def _put(self, key: str, query: dict[str, str], body: bytes) -> None:
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        if self.headers.get("x-amz-checksum-sha256", digest) != digest:
            return self.refuse(400, "BadDigest")
        etag = {"ETag": f'"{hashlib.md5(body).hexdigest()}"', "x-amz-checksum-sha256": digest}
        with self.owner.lock:
            if "uploadId" in query:
                if query["uploadId"] not in self.owner.uploads:
                    return self.refuse(404, "NoSuchUpload")
                self.owner.uploads[query["uploadId"]][int(query["partNumber"])] = body
            elif (
                self.headers.get("If-None-Match") == "*"
                and key in self.owner.objects
                and not self.owner.ignore_conditions
            ):
                return self.refuse(412, "PreconditionFailed")
            else:
                self._store(key, body)
        return self.answer(200, b"", etag)

    def _post(self, key: str, query: dict[str, str], body: bytes) -> None:
        with self.owner.lock:
            if "uploads" in query:
                upload = f"u{len(self.owner.requests)}"
                self.owner.uploads[upload] = {}
                return self._xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
            if "uploadId" in query:
                parts = self.owner.uploads.get(query["uploadId"])
                if parts is None:
                    return self.refuse(404, "NoSuchUpload")
                named = [int(e.text or 0) for e in ET.fromstring(body).iter() if e.tag.endswith("PartNumber")]
                if sorted(parts) != named or any(len(parts[n]) < 5 * 2**20 for n in named[:-1]):
                    return self.refuse(400, "InvalidPart")
                self._store(key, b"".join(parts[n] for n in named))
                del self.owner.uploads[query["uploadId"]]
                return self._xml("CompleteMultipartUploadResult", '<ETag>"x"</ETag>')
            if "delete" in query:
                names = [e.text or "" for e in ET.fromstring(body).iter() if e.tag.endswith("Key")]
                for name in names:
                    self.owner.objects.pop(f"{key.strip('/')}/{name}", None)
                gone = "".join(f"<Deleted><Key>{escape(n)}</Key></Deleted>" for n in names)
                return self._xml("DeleteResult", gone)
        return self.refuse(400, "InvalidRequest")

    def _delete(self, key: str, query: dict[str, str], body: bytes) -> None:
        with self.owner.lock:
            self.owner.uploads.pop(query.get("uploadId", ""), None)
            if "uploadId" not in query:
                self.owner.objects.pop(key, None)
        self.answer(204, b"", {})

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter, page = query.get("prefix", ""), query.get("delimiter", ""), 1000
        after = query.get("continuation-token", "")
        with self.owner.lock:
            keys = sorted(
                k[len(bucket) + 1 :] for k in self.owner.objects if k.startswith(f"{bucket}/{prefix}")
            )
            rows, folders, last = [], [], ""
            for k in (k for k in keys if k > after):
                rest = k[len(prefix) :]
                if delimiter and delimiter in rest:
                    folder = prefix + rest.split(delimiter)[0] + delimiter
                    if folder not in folders:
                        folders.append(folder)
                else:
                    size, when = (
                        len(self.owner.objects[f"{bucket}/{k}"]),
                        self.owner.modified[f"{bucket}/{k}"],
                    )
                    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(when))
                    rows.append(
                        f"<Contents><Key>{escape(k)}</Key><LastModified>{stamp}</LastModified>"
                        f'<ETag>"x"</ETag><Size>{size}</Size></Contents>'
                    )
                last = k
                if len(rows) + len(folders) >= page:
                    break
            more = bool(keys) and last != "" and last < keys[-1]
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        names = "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders)
        state = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        self._xml("ListBucketResult", state + "".join(rows) + names)

    def _store(self, key: str, data: bytes) -> None:
        self.owner.objects[key] = data
        self.owner.modified[key] = time.time()

    def _xml(self, root: str, inner: str) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?><{root}>{inner}</{root}>'
        self.answer(200, text.encode(), {"Content-Type": "application/xml"})


@dataclass
class FakeS3(FaultyServer):
    """The server; a context manager. `objects` {bucket/key: bytes} and `requests` may be read at any time."""

    objects: dict[str, bytes] = field(default_factory=dict)
    modified: dict[str, float] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    ignore_conditions: bool = False  # as stores that overwrite silently on a conditional PUT
    handler = _Handler

    def storage(self, place: str = "bucket/run", **more: Any) -> S3Storage:
        """A storage on this server, quick to give up unless told otherwise."""
        options = {
            "endpoint": self.endpoint,
            "access_key_id": "test",
            "secret_access_key": "test",
            "region": "x",
        }
        return S3Storage.from_url(f"s3://{place}", options=options, **{"request_timeout": 5.0, **more})
