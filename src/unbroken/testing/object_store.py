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
import socket
import threading
import time
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from xml.sax.saxutils import escape

from ..checkpoint.storage.s3 import S3Storage


@dataclass(frozen=True)
class Request:
    """One request as it came in; `number` counts from 1."""

    number: int
    method: str
    key: str
    query: dict[str, str]
    bytes: int

    @property
    def is_part(self) -> bool:
        """Whether it uploads a part of a multipart upload."""
        return self.method == "PUT" and "partNumber" in self.query


@dataclass(frozen=True)
class Fault:
    """What to do to a request: answer with `status`, wait `delay` seconds, reset the connection before the request
    is acted on (`reset`) or after it (`lose_answer`), flip a bit of the body that arrives (`flip`)."""

    status: int = 0
    code: str = "SlowDown"
    delay: float = 0.0
    reset: bool = False
    lose_answer: bool = False
    flip: bool = False


SLOW_DOWN = Fault(503, "SlowDown")
RESET = Fault(reset=True)


@dataclass
class FakeS3:
    """The server; a context manager. `objects` {bucket/key: bytes} and `requests` may be read at any time."""

    fault: Callable[[Request], Fault | None] = lambda _: None
    objects: dict[str, bytes] = field(default_factory=dict)
    modified: dict[str, float] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    ignore_conditions: bool = False  # as stores that overwrite silently on a conditional PUT
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> FakeS3:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"s3": self}))
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def storage(self, place: str = "bucket/run", **more: Any) -> S3Storage:
        """A storage on this server, quick to give up unless told otherwise."""
        options = {
            "endpoint": self.endpoint,
            "access_key_id": "test",
            "secret_access_key": "test",
            "region": "x",
        }
        return S3Storage.from_url(f"s3://{place}", options=options, **{"request_timeout": 5.0, **more})


class _Handler(BaseHTTPRequestHandler):
    s3: FakeS3
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a test's output is its own."""

    def _serve(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = urllib.parse.unquote(url.path).lstrip("/")
        with self.s3.lock:
            request = Request(len(self.s3.requests) + 1, self.command, key, query, len(body))
            self.s3.requests.append(request)
        fault = self.s3.fault(request) or Fault()
        if fault.delay:
            time.sleep(fault.delay)
        if fault.reset:
            return self._reset()
        if fault.status:
            return self._error(fault.status, fault.code)
        if fault.flip and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault.lose_answer:
            self._answer = lambda *_, **__: None  # type: ignore[method-assign]
        getattr(self, f"_{self.command.lower()}")(key, query, body)
        if fault.lose_answer:
            del self._answer
            self._reset()
        return None

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _get(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "list-type" in query:
            return self._list(key.strip("/"), query)
        with self.s3.lock:
            data, modified = self.s3.objects.get(key), self.s3.modified.get(key, 0.0)
        if data is None:
            return self._error(404, "NoSuchKey")
        headers = {
            "ETag": f'"{hashlib.md5(data).hexdigest()}"',
            "Last-Modified": formatdate(modified, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span:
            low, high = int(span[1]), min(int(span[2]) + 1, len(data))
            if low >= len(data):
                return self._error(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {low}-{high - 1}/{len(data)}"
            return self._answer(206, data[low:high], headers)
        return self._answer(200, data, headers)

    _head = _get

    def _put(self, key: str, query: dict[str, str], body: bytes) -> None:
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        if self.headers.get("x-amz-checksum-sha256", digest) != digest:
            return self._error(400, "BadDigest")
        etag = {"ETag": f'"{hashlib.md5(body).hexdigest()}"', "x-amz-checksum-sha256": digest}
        with self.s3.lock:
            if "uploadId" in query:
                if query["uploadId"] not in self.s3.uploads:
                    return self._error(404, "NoSuchUpload")
                self.s3.uploads[query["uploadId"]][int(query["partNumber"])] = body
            elif (
                self.headers.get("If-None-Match") == "*"
                and key in self.s3.objects
                and not self.s3.ignore_conditions
            ):
                return self._error(412, "PreconditionFailed")
            else:
                self._store(key, body)
        return self._answer(200, b"", etag)

    def _post(self, key: str, query: dict[str, str], body: bytes) -> None:
        with self.s3.lock:
            if "uploads" in query:
                upload = f"u{len(self.s3.requests)}"
                self.s3.uploads[upload] = {}
                return self._xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
            if "uploadId" in query:
                parts = self.s3.uploads.get(query["uploadId"])
                if parts is None:
                    return self._error(404, "NoSuchUpload")
                named = [int(e.text or 0) for e in ET.fromstring(body).iter() if e.tag.endswith("PartNumber")]
                if sorted(parts) != named or any(len(parts[n]) < 5 * 2**20 for n in named[:-1]):
                    return self._error(400, "InvalidPart")
                self._store(key, b"".join(parts[n] for n in named))
                del self.s3.uploads[query["uploadId"]]
                return self._xml("CompleteMultipartUploadResult", '<ETag>"x"</ETag>')
            if "delete" in query:
                names = [e.text or "" for e in ET.fromstring(body).iter() if e.tag.endswith("Key")]
                for name in names:
                    self.s3.objects.pop(f"{key.strip('/')}/{name}", None)
                gone = "".join(f"<Deleted><Key>{escape(n)}</Key></Deleted>" for n in names)
                return self._xml("DeleteResult", gone)
        return self._error(400, "InvalidRequest")

    def _delete(self, key: str, query: dict[str, str], body: bytes) -> None:
        with self.s3.lock:
            self.s3.uploads.pop(query.get("uploadId", ""), None)
            if "uploadId" not in query:
                self.s3.objects.pop(key, None)
        self._answer(204, b"", {})

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter, page = query.get("prefix", ""), query.get("delimiter", ""), 1000
        after = query.get("continuation-token", "")
        with self.s3.lock:
            keys = sorted(k[len(bucket) + 1 :] for k in self.s3.objects if k.startswith(f"{bucket}/{prefix}"))
            rows, folders, last = [], [], ""
            for k in (k for k in keys if k > after):
                rest = k[len(prefix) :]
                if delimiter and delimiter in rest:
                    folder = prefix + rest.split(delimiter)[0] + delimiter
                    if folder not in folders:
                        folders.append(folder)
                else:
                    size, when = len(self.s3.objects[f"{bucket}/{k}"]), self.s3.modified[f"{bucket}/{k}"]
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
        self.s3.objects[key] = data
        self.s3.modified[key] = time.time()

    def _xml(self, root: str, inner: str) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?><{root}>{inner}</{root}>'
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self._answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        """Ends the connection with a TCP reset."""
        self.close_connection = True
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
