"""Digests of replicas: one flipped bit shows, sharded pieces are not compared, and thousands of equal parts cost little."""

from __future__ import annotations

import pytest
import torch

from unbroken.checkpoint.capture.digests import begin_digests, digest_tensors
from unbroken.checkpoint.capture.state import capture
from unbroken.checkpoint.format.manifest import FileRecord, PartManifest, data_name
from unbroken.checkpoint.format.replicas import (
    NOT_COVERED,
    ReplicaComparison,
    Replicas,
    joined_json,
    read_joined,
)
from unbroken.checkpoint.format.shards import TensorShard
from unbroken.checkpoint.format.tensors import TensorPart


def read(state: dict[str, object], world: int = 2) -> str | None:
    found = begin_digests(capture(state), world)
    return None if found is None else found.read()


@pytest.mark.parametrize("elements", [1, 3, 1000, 2048, 5000, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_one_flipped_bit_shows(elements: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(elements)
    t = torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)
    data = t.view(torch.uint8)
    before = digest_tensors([t])
    for at in {0, elements // 2, elements - 1}:
        for bit in (0, 3, 7):
            byte = at * t.element_size() + bit % t.element_size()
            data[byte] ^= 1 << bit
            assert digest_tensors([t]) != before
            data[byte] ^= 1 << bit
    assert digest_tensors([t]) == before


def test_where_a_tensor_begins_in_memory_and_how_it_is_laid_out_say_nothing() -> None:
    flat = torch.randn(10_001)
    view = flat[1:]  # begins in the middle of eight bytes
    assert digest_tensors([view]) == digest_tensors([view.clone()])
    square = torch.randn(64, 64)
    assert digest_tensors([square.t()]) == digest_tensors([square.t().contiguous()])
    one, two = torch.randn(5000), torch.randn(7)
    assert torch.equal(digest_tensors([one, two]), torch.cat([digest_tensors([one]), digest_tensors([two])]))


def test_buffers_of_a_module_and_whole_numbers_are_not_compared() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    captured = capture({"model": model, "optimizer": optimizer})
    joined = read({"model": model, "optimizer": optimizer})
    assert joined is not None
    covered = [n for i, n in enumerate(captured.tensors) if joined[16 * i : 16 * i + 16] != NOT_COVERED]
    assert all("running" not in n and "num_batches" not in n for n in covered)
    assert {n for n in covered if n.startswith("model")} == {
        "model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias",
    }  # fmt: skip
    assert sum(n.startswith("optimizer") for n in covered) == 12  # step, exp_avg and exp_avg_sq of four
    assert read({"model": model}, world=1) is None


def part(
    rank: int, digests: dict[str, str], world: int = 4, boxes: dict[str, int] | None = None
) -> PartManifest:
    tensors = {
        n: TensorPart(
            "float32", (8,), (), (), (), (TensorShard(rank, ((boxes or {}).get(n, 0),), (4,), 0, n),)
        )
        for n in digests
    }
    return PartManifest(
        "r",
        1,
        5,
        rank,
        world,
        tensors,
        FileRecord(data_name(rank), 16, ("0" * 16,)),
        replicas="".join(digests.values()),
    )


def compare(*parts: PartManifest) -> ReplicaComparison:
    replicas = Replicas()
    for p in parts:
        replicas.add(p.rank, p.replicas, p.tensors)
    return replicas.compare()


A, B, C = ("a" * 16, "b" * 16, "c" * 16)


def test_the_minority_of_each_tensor_is_named() -> None:
    good = {"w": A, "m": B}
    assert compare(*(part(r, good) for r in range(4))) == ReplicaComparison(compared=2)
    found = compare(*(part(r, good if r != 2 else {"w": C, "m": B}) for r in range(4)))
    assert (found.compared, found.differing) == (2, 1)
    (difference,) = found.differences
    assert difference.name == "w" and difference.ranks == {A: (0, 1, 3), C: (2,)}


def test_pieces_that_one_rank_alone_holds_are_not_covered() -> None:
    sharded = [part(r, {"w": A if r else B, "v": NOT_COVERED}, boxes={"w": 4 * r}, world=2) for r in range(2)]
    assert compare(*sharded) == ReplicaComparison(compared=0, alone=3)
    # Two copies of each of two pieces, as with hybrid sharding.
    hybrid = [part(r, {"w": A if r % 2 else B}, boxes={"w": 4 * (r % 2)}) for r in range(4)]
    assert compare(*hybrid) == ReplicaComparison(compared=2)
    assert compare(*hybrid[:3], part(3, {"w": C}, boxes={"w": 4})).differing == 1


def test_parts_of_other_versions_say_nothing() -> None:
    assert read_joined(joined_json(A + B), 2) == A + B
    assert read_joined(joined_json(A), 2) == ""
    assert read_joined({"algorithm": "other", "digests": A}, 1) == ""
    assert (
        read_joined(None, 1) == "" and read_joined({"algorithm": "columns64", "digests": "x" * 16}, 1) == ""
    )
    old = part(0, {"w": A})
    plain = PartManifest(old.run_id, 1, 5, 0, 4, old.tensors, old.file)
    assert b"replicas" not in plain.encoded
    again = PartManifest.decode(old.encoded, where="x")
    assert again.replicas == A and again.encoded == old.encoded
