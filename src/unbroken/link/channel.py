"""One end of a connection between processes that have threads: messages, and descriptors over Unix sockets.

Descriptors (memfds) travel with SCM_RIGHTS beside the first byte of the message that names them. Standard library
only: the keeper starts with this.
"""

from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Sequence

from .bounds import Malformed, Message, decode
from .framing import LENGTH, TooLarge, encode
from .tls import TlsSocket

MAX_MESSAGE_BYTES = 256 << 20
MAX_DESCRIPTORS = 64
VALUES = 16_000_000
"""Values in one message at most: a rank's share of a manifest may name a hundred thousand tensors."""
_READ = 1 << 20


class Closed(ConnectionError):
    """The other side is gone, or speaks something else."""


class Channel:
    """Any thread may send; one thread receives, messages of at most `limit` bytes. `most` is what may be sent at once.

    Without `descriptors` none are taken: those that come all the same are closed by the kernel.
    """

    def __init__(
        self,
        sock: socket.socket | TlsSocket,
        *,
        limit: int = MAX_MESSAGE_BYTES,
        most: int = MAX_MESSAGE_BYTES,
        values: int = VALUES,
        descriptors: bool = False,
    ) -> None:
        self.sock = sock
        self._with_descriptors = (
            descriptors and isinstance(sock, socket.socket) and sock.family == socket.AF_UNIX
        )
        self.limit, self.most, self._values = limit, most, values
        self._sending = threading.Lock()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Sends one message whole. Raises Closed, TooLarge."""
        body = encode(message)
        if len(body) > self.most:
            raise TooLarge(f"a message of {len(body):,} bytes is above the limit of {self.most:,}")
        data = LENGTH.pack(len(body)) + body
        try:
            with self._sending:
                sent = 0
                if descriptors:
                    if isinstance(self.sock, TlsSocket):
                        raise Closed("descriptors do not leave a machine")
                    rights = array.array("i", descriptors)
                    sent = self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                self.sock.sendall(memoryview(data)[sent:])
        except OSError as e:
            raise e if isinstance(e, Closed) else Closed(f"sending failed: {e}") from e

    def send_bytes(self, data: memoryview) -> None:
        """Sends bytes as they are, between two messages that say so. Raises OSError."""
        self.sock.sendall(data)

    def receive(self) -> tuple[Message, list[int]]:
        """Waits for the next message and its descriptors, which the caller must close. Raises Closed."""
        descriptors: list[int] = []
        try:
            (length,) = LENGTH.unpack(self._exactly(LENGTH.size, descriptors))
            if length > self.limit:
                raise Closed(f"a message of {length} bytes was announced, the limit is {self.limit}")
            message = decode(self._exactly(length, descriptors), values=self._values)
        except (OSError, Malformed) as e:
            for fd in descriptors:
                os.close(fd)
            raise e if isinstance(e, Closed) else Closed(f"receiving failed: {e}") from e
        return message, descriptors

    def receive_bytes(self, into: memoryview) -> None:
        """Fills `into` with the bytes that follow the last message. Raises OSError, Closed."""
        got = 0
        while got < len(into):
            n = self.sock.recv_into(into[got:])
            if n == 0:
                raise Closed("the other side closed in the middle")
            got += n

    def _exactly(self, count: int, descriptors: list[int]) -> bytearray:
        # A stranger may announce more than it sends: memory is taken as the bytes come.
        data = bytearray(min(count, _READ))
        got = 0
        while got < count:
            if got == len(data):
                data += bytes(min(count - got, len(data)))
            view = memoryview(data)
            n = self._receive_some(view[got:], descriptors)
            view.release()
            if n == 0:
                raise Closed("the other side closed the connection")
            got += n
        return data

    def _receive_some(self, view: memoryview, descriptors: list[int]) -> int:
        if isinstance(self.sock, TlsSocket) or not self._with_descriptors:
            return self.sock.recv_into(view)
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        n, extra, flags, _ = self.sock.recvmsg_into([view], room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                descriptors.extend(fds)
        if len(descriptors) > MAX_DESCRIPTORS:
            raise Closed(f"more than {MAX_DESCRIPTORS} descriptors came with one message")
        if flags & socket.MSG_CTRUNC:
            raise Closed("descriptors were lost on the way (limit of open files?)")
        return n

    def close(self) -> None:
        """Ends the connection, also under a thread that waits in `receive`."""
        shut(self.sock)
        self.sock.close()


def shut(sock: socket.socket | TlsSocket) -> None:
    """Ends a connection under the thread that reads from it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
