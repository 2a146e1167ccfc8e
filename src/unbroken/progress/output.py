"""What a rank prints lies in the run's folder: a disk that refuses it costs those lines, and not the training."""

from __future__ import annotations

import io
import os
import stat
import sys


class _Spared(io.FileIO):
    """A file whose refused writes are counted, and told of with the next one that it takes."""

    _lost = 0

    def write(self, data: object) -> int:
        size = memoryview(data).nbytes  # type: ignore[arg-type]
        try:
            if self._lost:
                note = (
                    f"\n[unbroken: {self._lost} bytes of output are lost: this file could not be written]\n"
                )
                super().write(note.encode())
                self._lost = 0
            written: int = super().write(data)  # type: ignore[arg-type]
        except OSError:
            written = 0
        self._lost += size - written
        return size


def spare_training() -> None:
    """Lets this process's own stdout and stderr fail in silence where they are files; what somebody has put in their place stays."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper or stream is not getattr(sys, f"__{name}__"):
            continue
        try:
            if stream.fileno() != fd or not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            stream.flush()
        except (OSError, ValueError):
            continue
        raw = _Spared(fd, "wb", closefd=False)
        spared = io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),
            encoding=stream.encoding, errors=stream.errors, newline="\n", line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )  # fmt: skip
        setattr(sys, name, spared)
