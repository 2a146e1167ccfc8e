"""What the format costs on this disk: writing, verifying, resharding, merging a large run, uploading; as ratios.

    python benchmarks/checkpoint_storage.py [--mib 1024] [--folder DIR] [--out benchmarks/results/checkpoint_storage.json]

Each figure stands beside its probe, measured in the same run and alternating with it: writing beside a plain
sequential write of the same bytes with fsync; verifying and loading (four ranks into one) beside a plain read with a cold page cache;
hashing alone. `--out` keeps median and spread of `--rounds` rounds, machine, commit and date. Uploading needs
`ministack` (requirements/all.txt) and is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from unbroken.checkpoint.capture import direct
from unbroken.checkpoint.catalogue import contents as catalogue
from unbroken.checkpoint.catalogue.mirror import mirror
from unbroken.checkpoint.format.manifest import CHUNK_BYTES, Sharding
from unbroken.checkpoint.restore import reshard
from unbroken.checkpoint.storage.posix import PosixStorage
from unbroken.journal.checksummed import digest


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cold(path: Path) -> None:
    """Drops a file's (or a folder's files') pages from the cache; needs no privileges."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        with open(file, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw_write(path: Path, memory: mmap.mmap) -> None:
    """The disk's own speed: the same bytes, sequentially, past the page cache where it lets us, with fsync."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError:
        fd = os.open(path, flags)
    with memoryview(memory) as view:
        at = 0
        while at < len(view):
            at += os.write(fd, view[at : at + CHUNK_BYTES])
    os.fsync(fd)
    os.close(fd)


def raw_read(path: Path, into: mmap.mmap) -> None:
    """The disk's own speed when it reads."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        fd, at = os.open(file, os.O_RDONLY), 0
        with memoryview(into) as view:
            while n := os.preadv(fd, [view[:CHUNK_BYTES]], at):
                at += n
        os.close(fd)


def disk(root: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender, round by round."""
    storage, memory = PosixStorage(root), mmap.mmap(-1, size)
    block = os.urandom(1 << 24)
    for at in range(0, size, len(block)):
        memory[at : at + len(block)] = block[: size - at]
    view = memoryview(memory)
    chunks = [view[i : i + CHUNK_BYTES] for i in range(0, size, CHUNK_BYTES)]
    took: dict[str, list[float]] = {
        n: [] for n in ("raw write", "write", "raw read", "verify", "reshard", "hash")
    }

    parts = []
    rows = size // 4 // 1024 // 4
    for rank in range(4):
        stored = torch.frombuffer(memory, dtype=torch.float32, count=rows * 1024, offset=rank * rows * 4096)
        box = ((rank * rows, 0), (rows, 1024))
        records = {"w": ("float32", Sharding((4 * rows, 1024), ("Shard(0)",), (4,), ("dp",), (box,)))}
        stamp = direct.Stamp("bench", 1, 1, rank, 4)
        tree = {"w": {"$": "tensor", "name": "w"}}
        piece = stored.reshape(rows, 1024)
        parts.append(direct.write_pieces(storage, records, lambda _, p=piece: p, tree, stamp))
    name = direct.commit(storage, parts).name
    # As a live state is: memory that has been touched. Fresh memory would add its page faults, 1 s for each GiB.
    live = torch.ones(4 * rows, 1024)
    for _ in range(rounds):
        took["raw write"].append(timed(lambda: raw_write(root / "raw", memory)))
        took["write"].append(timed(lambda: storage.write("x/ours", iter(chunks), size)))
        cold(root / name)
        took["raw read"].append(timed(lambda: raw_read(root / name, mmap.mmap(-1, CHUNK_BYTES))))
        cold(root / name)
        took["verify"].append(timed(lambda: _must(catalogue.verify_in(storage, name).ok)))
        cold(root / name)
        took["reshard"].append(timed(lambda: reshard.load(storage, name, {"w": live})))
        took["hash"].append(timed(lambda: [digest(c) for c in chunks]))
    shutil.rmtree(root / name)
    return took


def _must(ok: bool) -> None:
    if not ok:
        raise SystemExit("the checkpoint did not verify")


def large_run(ranks: int, tensors: int) -> dict[str, float]:
    """What large_run.py measures: in a process of its own, which like a keeper has not imported torch."""
    command = [sys.executable, str(Path(__file__).with_name("large_run.py")), str(ranks), str(tensors)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@contextlib.contextmanager
def bucket() -> Iterator[Any]:
    """An S3Storage on a ministack process of our own."""
    from unbroken.checkpoint.storage.s3 import S3Storage

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    home = tempfile.mkdtemp()
    environment = os.environ | {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "HOME": home,
        "SERVICES": "s3",
    }
    command = [str(Path(sys.executable).parent / "ministack")]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=home
    )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"), timeout=2)
                break
            time.sleep(0.1)
        options = {"endpoint": address, "access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
        yield S3Storage.from_url("s3://bucket/bench", options=options)
    finally:
        process.terminate()
        process.wait(20)
        shutil.rmtree(home, ignore_errors=True)


def upload(root: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to copy a checkpoint into a bucket and back."""
    storage, took = PosixStorage(root), {"upload": list[float](), "download": list[float]()}
    with bucket() as target:
        for i in range(rounds):
            part = direct.write_rank(storage, {"w": torch.randn(size // 4)}, direct.Stamp("bench", 1, 10 + i))
            name = direct.commit(storage, [part]).name
            took["upload"].append(timed(lambda n=name: mirror(storage, n, target)))
            took["download"].append(timed(lambda n=name: mirror(target, n, PosixStorage(root / "back"))))
            for place in (storage, target, PosixStorage(root / "back")):
                place.delete_folder(name)
    return took


def main() -> None:
    """Runs every contender and prints, and keeps, what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = args.mib << 20
    root = Path(tempfile.mkdtemp(dir=args.folder, prefix="checkpoint-storage-"))
    try:
        took = disk(root, size, args.rounds)
        small = min(size, 256 << 20)
        if (Path(sys.executable).parent / "ministack").exists():
            took |= upload(root, small, min(3, args.rounds))
    finally:
        shutil.rmtree(root)
    rates = {
        n: {
            "mib_per_s": round((small if "load" in n else size) / statistics.median(t) / 2**20, 1),
            "seconds": [round(x, 3) for x in t],
        }
        for n, t in took.items()
        if t
    }

    def paired(a: str, b: str) -> float:
        return round(statistics.median(x / y for x, y in zip(took[a], took[b], strict=True)), 3)

    ratios = {
        "write / raw write": paired("write", "raw write"),
        "verify / raw read": paired("verify", "raw read"),
        "reshard / raw read": paired("reshard", "raw read"),
    }
    result = {
        "bytes": size, "rates": rates, "ratios": ratios, "large_run": large_run(args.ranks, args.tensors),
        "machine": describe_machine(), "torch": str(torch.__version__),
    }  # fmt: skip
    for name, r in rates.items():
        print(f"{name:12} {r['mib_per_s']:>9} MiB/s")
    for name, ratio in ratios.items():
        print(f"{name:20} {ratio}")
    print(json.dumps(result["large_run"]))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
