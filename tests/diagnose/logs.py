"""Small logs of our own for the tests of this folder."""

from __future__ import annotations

from pathlib import Path


def steps(n: int, start: int = 1, loss: float = 2.0) -> str:
    return "".join(
        f"[2026-05-01 10:{(i // 60) % 60:02d}:{i % 60:02d}] step: {i} loss: {loss + 0.01 * (i % 7):.4f} tps: 5,8{i % 90:02d}\n"
        for i in range(start, start + n)
    )


def traceback(
    error: str, rank: int | None = None, frame: str = 'File "/app/train.py", line 7, in main'
) -> str:
    prefix = f"[rank{rank}]: " if rank is not None else ""
    rows = ["Traceback (most recent call last):", f"  {frame}", "    run()", error]
    return "".join(f"{prefix}{r}\n" for r in rows)


def job(
    folder: Path, body: str, name: str = "log.txt", nodes: str = "node-001,node-002", per_node: int = 4
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    head = f"[2026-05-01 09:59:00] submitting job 4711 nodelist={nodes} gpus_per_node={per_node}\n"
    path = folder / name
    path.write_text(head + body)
    return path
