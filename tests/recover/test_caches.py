"""What one node's ranks have compiled, on its way to spares: all of it arrives, and nothing else is written there."""

from __future__ import annotations

import asyncio
import getpass
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.cluster.hello import Hello
from unbroken.errors import RunError
from unbroken.recover.node.warm.caches import CompileCaches, find_folders, is_compiled, pack, unpack
from unbroken.recover.supervise.launch.warm_starts import WarmStarts
from unbroken.recover.supervise.nodes.node import Node
from unbroken.recover.wire import LOG_BYTES


def environment(folder: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def fill(folder: Path) -> dict[str, bytes]:
    """Caches as torch leaves them, larger than one piece, with locks and half-written files between."""
    kept = {
        "inductor/fxgraph/ab/key/entry": os.urandom(LOG_BYTES),
        "inductor/cd/kernel.py": b"x = 1",
        "triton/0/k.cubin": b"\0" * 99,
    }
    for name, data in {
        **kept,
        "inductor/locks/a.lock": b"",
        "inductor/tmp9/x": b"half",
        "inductor/.cd.aside": b"half",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        os.utime(folder / name, (1.7e9, 1.7e9))
    return kept


def read(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Agents:
    """The agents of two nodes behind a fleet's `ask`."""

    def __init__(self, tmp_path: Path) -> None:
        facts = [Hello(n, "run", n, n, "/python", "1", 1, 0, 0, "/scratch", 0) for n in ("a", "b")]
        self.nodes = {f.node: Node(f.node, facts=f, hello={"pid": 1}) for f in facts}
        self.caches = {n: CompileCaches(environment(tmp_path / n)) for n in self.nodes}
        self.pieces = 0

    async def ask(self, name: str, op: str, *, timeout: float, **fields: Any) -> Any:
        self.pieces += op == "caches"
        return await getattr(self.caches[name], {"caches": "give", "take_caches": "take"}[op])(**fields)

    async def ask_all(self, names: list[str], op: str, **fields: Any) -> dict[str, Any]:
        return {n: await self.ask(n, op, **fields) for n in names}


def test_what_one_node_has_compiled_comes_whole_to_a_spare_and_once(tmp_path: Path) -> None:
    kept = fill(tmp_path / "a")
    (tmp_path / "b" / "triton" / "0").mkdir(parents=True)
    (tmp_path / "b" / "triton" / "0" / "k.cubin").write_bytes(b"its own")
    agents, noted = Agents(tmp_path), []

    async def record(kind: str, **fields: Any) -> None:
        noted.append((kind, fields["of"], fields["nodes"]))

    starts: Any = WarmStarts(
        SimpleNamespace(warm="auto"), agents, SimpleNamespace(record_soft=record), None, print, bool  # type: ignore[arg-type]
    )  # fmt: skip
    asyncio.run(starts._carry_caches("a", ["b"]))
    assert read(tmp_path / "b") == {**kept, "triton/0/k.cubin": b"its own"}
    assert agents.pieces > 1 and noted == [("caches", "a", ["b"])]
    asyncio.run(starts._carry_caches("a", ["b"]))
    assert agents.pieces <= 5 and len(noted) == 1, "it has them"


def test_the_newest_files_that_fit_are_taken(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    os.utime(tmp_path / "a" / "inductor" / "fxgraph" / "ab" / "key" / "entry", (1, 1))
    packed = io.BytesIO()
    pack(find_folders(environment(tmp_path / "a")), packed, limit=1000)
    packed.seek(0)
    assert unpack(packed, find_folders(environment(tmp_path / "b"))) == 2
    assert "inductor/fxgraph/ab/key/entry" not in read(tmp_path / "b")


def test_a_file_whose_writer_may_not_be_done_is_left_out(tmp_path: Path) -> None:
    """A compiler writes a library in place: half of one, found under its key, would fail at each start there."""
    kept = fill(tmp_path / "a")
    (tmp_path / "a" / "inductor" / "cd" / "kernel.so").write_bytes(b"half")
    packed = io.BytesIO()
    pack(find_folders(environment(tmp_path / "a")), packed)
    packed.seek(0)
    assert unpack(packed, find_folders(environment(tmp_path / "b"))) == 3 and read(tmp_path / "b") == kept


@pytest.mark.parametrize(("of", "name"), [(Path, "lstat"), (tarfile.TarFile, "add")])
def test_a_file_that_vanishes_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: type, name: str
) -> None:
    kept = fill(tmp_path / "a")
    gone, do = tmp_path / "a" / "inductor" / "cd" / "kernel.py", getattr(of, name)

    def vanish(*args: Any, **how: Any) -> Any:
        if gone in args:
            gone.unlink(missing_ok=True)
        return do(*args, **how)

    packed = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(of, name, vanish)
        pack(find_folders(environment(tmp_path / "a")), packed)
    packed.seek(0)
    assert unpack(packed, find_folders(environment(tmp_path / "b"))) == 2
    assert read(tmp_path / "b") == {n: data for n, data in kept.items() if n != "inductor/cd/kernel.py"}


@pytest.mark.parametrize("refusal", [KeyError, OSError])
def test_a_user_without_a_name_has_caches_where_torch_has_them(
    monkeypatch: pytest.MonkeyPatch, refusal: type[Exception]
) -> None:
    """A container runs under a number that its /etc/passwd need not know; an agent starts there all the same."""

    def refuse() -> str:
        raise refusal("getpwuid(): uid not found: 1000")

    monkeypatch.setattr(getpass, "getuser", refuse)
    assert find_folders({"TORCHINDUCTOR_CACHE_DIR": "/c"}) == [Path("/c")]
    (folder,) = find_folders({})
    assert folder.name == f"torchinductor_uid_{os.getuid()}"


@pytest.mark.parametrize("name", ["../x", "0/../../x", "2/x", "/etc/x", "0", ""])
def test_nothing_is_written_outside_of_the_caches(tmp_path: Path, name: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    packed.seek(0)
    assert unpack(packed, find_folders(environment(tmp_path / "b"))) == 0
    assert not read(tmp_path)


def test_pieces_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    caches = CompileCaches(environment(tmp_path))
    for offset, total, data in ((0, 3, "AAAA"), (5, 10, "AAAA"), (0, 3, "\u00e9")):
        with pytest.raises(RunError):
            asyncio.run(caches.take(offset, total, data))
    assert asyncio.run(CompileCaches(environment(tmp_path / "none")).give(0)) == {
        "total": 0,
        "size": 0,
        "data": "",
    }
    assert is_compiled({"0": ["torch", "torch._inductor.codecache"]}) and not is_compiled({"0": ["torch"]})


COMPILED = """
import torch
from torch._dynamo.utils import counters
torch.compile(lambda x: torch.sin(x).sum() + x.mean())(torch.ones(64))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_the_compiler_finds_what_was_carried(tmp_path: Path) -> None:
    """In another folder even, by another process."""

    def run(node: str) -> list[int]:
        env = {**os.environ, **environment(tmp_path / node)}
        done = subprocess.run(
            [sys.executable, "-c", COMPILED],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if "No working C++ compiler" in done.stderr or "g++" in done.stderr:
            pytest.skip("torch finds no compiler here")
        assert done.returncode == 0, done.stderr
        return [int(x) for x in done.stdout.split()]

    assert run("a")[1] >= 1
    packed = io.BytesIO()
    pack(find_folders(environment(tmp_path / "a")), packed, settled_s=0.0)
    packed.seek(0)
    assert unpack(packed, find_folders(environment(tmp_path / "b"))) >= 1
    assert run("b") == [1, 0]
