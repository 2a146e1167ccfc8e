"""Where readings go: a spool that grows each tick, packed into a bounded file of the trace schema's `samples`.

The spool is plain CSV, written with one system call a tick, so a kill or a dead node loses at most the tick in
flight, and anybody can read it meanwhile. At `max_bytes` or `max_age_s` it is closed and a child process packs it
into `samples-*.parquet` (sorted, zstd), or, where pyarrow is not installed, into `samples-*.csv.gz` with the same
columns. A recorder that starts packs the spools that a dead one left; a live one holds a lock on its spool.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ...errors import InputError, StorageError
from ...samples.schema import SAMPLES
from ..samplers.reading import Reading

HEADER = ",".join(SAMPLES.names) + "\n"
SPOOL_SUFFIX = ".spool.csv"


class Spool:
    """Appends readings of one node to bounded files in a folder."""

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        cluster: str | None = None,
        max_bytes: int = 64 << 20,
        max_age_s: float = 3600.0,
        keep_bytes: int | None = None,
    ) -> None:
        if any(c in node + (cluster or "") for c in ',"\n\r/'):
            raise InputError(
                f"a comma, quote, slash or line break is in the name of node or cluster: {node} {cluster}"
            )
        self.folder, self.node, self.cluster = folder, node, cluster or ""
        self._max_bytes, self._max_age_s, self._keep_bytes = max_bytes, max_age_s, keep_bytes
        self._fd: int | None = None
        self._size, self._since = 0, 0.0
        self._sequence = 0
        self._packers: list[subprocess.Popen[bytes]] = []
        self._tails: dict[tuple[int | None, str | None, str], str] = {}
        self.dropped_ticks = 0
        """Ticks that could not be written (a full disk); recording goes on."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as e:
            raise StorageError(f"readings cannot be written: {e.strerror}", where=str(folder)) from e
        for left in sorted(folder.glob(f"*{SPOOL_SUFFIX}")):
            if left != self._path and is_abandoned(left):
                self._pack(left)

    def write(self, when: float, readings: Iterable[Reading]) -> None:
        """Appends one tick; `when` is the wall-clock time in seconds."""
        stamp = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
        head = f"{stamp},{self.cluster},{self.node},"
        lines = []
        for gpu, device, metric, value in readings:
            tail = self._tails.get((gpu, device, metric))
            if tail is None:
                tail = self._tails[gpu, device, metric] = (
                    f"{'' if gpu is None else gpu},{_quoted(device)},{metric},"
                )
            lines.append(f"{head}{tail}{value!r}\n")
        data = "".join(lines).encode()
        try:
            if self._fd is None:
                self._open()
            self._append(data)
        except OSError:
            self.dropped_ticks += 1
            return
        if self._size >= self._max_bytes or time.monotonic() - self._since >= self._max_age_s:
            self.rotate()

    def rotate(self) -> None:
        """Closes the spool and packs it; the next write opens another."""
        if self._fd is None:
            return
        path, empty = self._path, self._size <= len(HEADER)
        os.close(self._fd)
        self._fd = None
        if empty:
            path.unlink(missing_ok=True)
        else:
            self._pack(path)
        self._packers = [p for p in self._packers if p.poll() is None]
        self._forget_oldest()

    def close(self, deadline_s: float = 120.0) -> None:
        """Packs what is left and waits for the packers."""
        self.rotate()
        for p in self._packers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(deadline_s)
        self._packers = []

    def _open(self) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        self._path = (
            self.folder / f"samples-{self.node}-{stamp}-{os.getpid()}-{self._sequence:04d}{SPOOL_SUFFIX}"
        )
        self._sequence += 1
        self._fd = os.open(
            self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._size, self._since = 0, time.monotonic()
        self._append(HEADER.encode())

    def _append(self, data: bytes) -> None:
        assert self._fd is not None
        written = os.write(self._fd, data)
        if written < len(data):
            # A disk that filled in the middle of a tick: take the torn part back.
            os.ftruncate(self._fd, self._size)
            raise OSError("no space left")
        self._size += written

    def _pack(self, path: Path) -> None:
        command = [sys.executable, "-m", "unbroken.telemetry.recording.pack", str(path)]
        self._packers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))

    def _forget_oldest(self) -> None:
        if self._keep_bytes is None:
            return
        files = sorted(find_packed(self.folder, self.node), key=lambda p: p.name)
        sizes = {p: p.stat().st_size for p in files}
        while files and sum(sizes[p] for p in files) > self._keep_bytes:
            files.pop(0).unlink(missing_ok=True)


def find_packed(folder: Path, node: str = "*") -> list[Path]:
    """The packed files of a node (of all nodes)."""
    return [p for s in ("parquet", "csv.gz") for p in folder.glob(f"samples-{node}-*.{s}")]


def is_abandoned(spool: Path) -> bool:
    """Whether no live recorder holds the spool."""
    try:
        with open(spool, "rb") as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def pack(spool: Path) -> Path | None:
    """Packs a closed spool into Parquet, or gzipped CSV without pyarrow, and removes it.

    Returns the new file; None for a spool without any reading.

    A torn last line (the tick that a kill interrupted) is left out. Raises StorageError; the spool stays then.
    """
    stem = spool.name.removesuffix(SPOOL_SUFFIX)
    try:
        _drop_torn_line(spool)
        if spool.stat().st_size <= len(HEADER):
            spool.unlink()
            return None
        try:
            import pyarrow as pa
            import pyarrow.csv
            import pyarrow.parquet
        except ImportError:
            target = spool.with_name(f"{stem}.csv.gz")
            aside = target.with_name(f".{target.name}.aside")
            with open(spool, "rb") as source, gzip.open(aside, "wb", compresslevel=6) as out:
                shutil.copyfileobj(source, out, 1 << 20)
        else:
            target = spool.with_name(f"{stem}.parquet")
            aside = target.with_name(f".{target.name}.aside")
            pa.set_cpu_count(1)
            schema = SAMPLES.arrow()
            options = pa.csv.ConvertOptions(
                column_types=schema, strings_can_be_null=True, quoted_strings_can_be_null=False
            )
            table = pa.csv.read_csv(
                spool, convert_options=options, read_options=pa.csv.ReadOptions(use_threads=False)
            )
            keys: Sequence[tuple[str, str]] = [
                (k, "ascending") for k in ("metric", "node", "gpu", "device", "time_utc")
            ]
            table = table.sort_by(keys).replace_schema_metadata(schema.metadata)
            pa.parquet.write_table(table, aside, compression="zstd", row_group_size=1 << 17)
        with open(aside, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(aside, target)
        spool.unlink()
    except (OSError, ValueError) as e:
        raise StorageError(
            f"readings cannot be packed: {e}", where=str(spool), hint="Run the same command again"
        ) from e
    return target


def _drop_torn_line(path: Path) -> None:
    with open(path, "rb+") as f:
        size = f.seek(0, os.SEEK_END)
        if size == 0:
            f.write(HEADER.encode())
            return
        back = min(size, 1 << 16)
        f.seek(size - back)
        end = f.read(back).rfind(b"\n")
        f.truncate(size - back + end + 1)


def _quoted(device: str | None) -> str:
    if not device:
        return ""
    return '"' + device.replace('"', '""') + '"' if any(c in device for c in ',"\n') else device
