"""Parts, manifest and marker: what is torn, flipped, mixed or incomplete never passes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.checkpoint.format.layout import plan, spec
from unbroken.checkpoint.format.manifest import (
    CHUNK_BYTES,
    Committed,
    FileRecord,
    Manifest,
    PartManifest,
    Sharding,
    data_name,
    merge,
    stored_name,
    tensor_part,
)
from unbroken.checkpoint.format.position import Position, merged, read_position
from unbroken.checkpoint.format.shards import RunBuilder, ShardRun, TensorShard, gap_in, gap_in_runs
from unbroken.data.position import normalize
from unbroken.errors import CheckpointCorrupt, CheckpointTooNew
from unbroken.journal import checksummed
from unbroken.progress.records.candidate import folder_name, parse_folder_name


def part(
    rank: int, world: int = 2, *, rows: int = 3, step: int = 12, attempt: int = 3, **more: Any
) -> PartManifest:
    """A rank with a row-sharded tensor, a replicated one, an alias and values."""
    layout = plan([spec("w", "float32", (rows, 5)), spec("b", "bfloat16", (7,))], {"tied": "w"})
    sharding = Sharding((rows * world, 5), ("Shard(0)",), (world,), ("dp",), (((rows * rank, 0), (rows, 5)),))
    tensors = {
        "w": tensor_part(rank, layout, "w", "torch.float32", sharding),
        "b": tensor_part(rank, layout, "b", "torch.bfloat16", Sharding.whole((7,))),
    }
    file = FileRecord(data_name(rank), layout.file_bytes, ("0123456789abcdef",))
    return PartManifest(
        "run", attempt, step, rank, world, tensors, file, aliases={"tied": "w"},
        values={"lr": 0.1, "zz": 1, "aa": [1, None]}, rng={"python": [rank]},
        position=Position(2, ((0, 10 * (rank + 1)),), ()), **more,
    )  # fmt: skip


def test_they_come_back_byte_for_byte() -> None:
    parts = [part(r) for r in range(2)]
    for p in parts:
        again = PartManifest.decode(p.encoded, where="x")
        assert again == p
        assert again.encoded == p.encoded
    manifest = merge(parts)
    assert Manifest.decode(manifest.encoded, where="x") == manifest
    assert Manifest.decode(manifest.encoded, where="x").encoded == manifest.encoded
    marker = Committed.of(manifest, node="n", time=3.5)
    assert Committed.decode(marker.encoded, where="x") == marker
    assert marker.admit(manifest.encoded, where="x") == manifest
    assert list(manifest.values) == ["lr", "zz", "aa"], "the order of a user's dict is the user's"


def test_the_merge_says_where_everything_is() -> None:
    manifest = merge(part(r) for r in range(2))
    w = manifest.tensors["w"]
    assert (w.kind, w.shape, w.placements, w.mesh) == ("sharded", (6, 5), ("Shard(0)",), (2,))
    assert [(s.rank, s.offsets, s.sizes) for s in w.shards()] == [(0, (0, 0), (3, 5)), (1, (3, 0), (3, 5))]
    assert len(w.runs) == 1
    assert manifest.tensors["b"].kind == "replicated"
    assert manifest.tensors["tied"].runs == w.runs
    assert dict(manifest.aliases) == {"tied": "w"}
    assert manifest.position == Position(2, ((0, 20),), ())
    assert manifest.name == "step-00000012.a0003"


def test_two_keepers_write_the_same_manifest() -> None:
    parts = [part(r) for r in range(3 - 1)]
    other = [PartManifest.decode(p.encoded, where="x") for p in parts]
    assert merge(parts).encoded == merge(iter(other)).encoded


def test_a_part_that_another_writer_ordered_otherwise_still_matches() -> None:
    p = part(0, 1)
    fields = checksummed.decode_checked(p.encoded, "unbroken.checkpoint.part", where="x").value
    body = {k: v for k, v in reversed(list(fields.items())) if k not in ("check", "kind", "schema")}
    data = checksummed.encode_checked("unbroken.checkpoint.part", body)
    read = PartManifest.decode(data, where="x")
    merge([read]).check_part(read, data)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "no part"),
        ([part(0)], "1 of 2 ranks"),
        ([part(1), part(0)], "missing or doubled"),
        ([part(0), part(0)], "missing or doubled"),
        ([part(0), part(1), part(2, 3)], "world_size"),
        ([part(0), part(1, step=13)], "step is 13"),
        ([part(0), part(1, attempt=4)], "attempt is 4"),
        ([part(0), dataclasses.replace(part(1), run_id="other")], "run_id"),
        ([part(0), dataclasses.replace(part(1), position=Position(3))], "different epochs"),
    ],
)
def test_parts_that_do_not_belong_together(parts: list[PartManifest], why: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=why):
        merge(parts)


def reshaped(p: PartManifest, name: str, **change: Any) -> PartManifest:
    return dataclasses.replace(p, tensors={**p.tensors, name: p.tensors[name]._replace(**change)})


def test_shards_must_tile_and_agree() -> None:
    moved = (part(1).tensors["w"].shards[0]._replace(offsets=(2, 0)),)
    with pytest.raises(CheckpointCorrupt, match="overlap"):
        merge([part(0), reshaped(part(1), "w", shards=moved)])
    with pytest.raises(CheckpointCorrupt, match="15 of 30 elements"):
        merge([part(0), reshaped(part(1), "w", shards=())])
    with pytest.raises(CheckpointCorrupt, match="disagree on the type"):
        merge([part(0), reshaped(part(1), "b", dtype="float16")])
    with pytest.raises(CheckpointCorrupt, match="disagree on the shape"):
        merge([part(0), reshaped(part(1), "w", shape=(7, 5))])


def test_a_tensor_of_another_shape_on_each_rank_is_local() -> None:
    parts = [part(0), reshaped(part(1), "b", shape=(6,), shards=(TensorShard(1, (0,), (6,), 4096, "b"),))]
    manifest = merge(parts)
    assert manifest.tensors["b"].kind == "local"
    assert [s.sizes for s in manifest.tensors["b"].shards()] == [(7,), (6,)]
    assert Manifest.decode(manifest.encoded, where="x") == manifest


def test_an_alias_that_is_a_tensor_of_its_own_elsewhere_is_no_tie() -> None:
    layout = plan([spec("w", "float32", (3, 5)), spec("tied", "float32", (3, 5))])
    sharding = Sharding((6, 5), ("Shard(0)",), (2,), ("dp",), (((3, 0), (3, 5)),))
    own = {n: tensor_part(1, layout, n, "float32", sharding) for n in ("w", "tied")}
    own["b"] = part(1).tensors["b"]
    manifest = merge([part(0), dataclasses.replace(part(1), tensors=own, aliases={})])
    assert dict(manifest.aliases) == {}
    assert [s.stored for s in manifest.tensors["tied"].shards()] == ["w", "tied"]


def test_a_thousand_ranks_are_one_line() -> None:
    manifest = merge(part(r, 1024, rows=2) for r in range(1024))
    assert len(manifest.tensors["w"].runs) == 1
    assert len(manifest.encoded) < 40_000, "1,024 ranks with 25 bytes each, and little more"
    assert len(manifest.tensors["w"].shards()) == 1024


def test_newer_versions_say_so() -> None:
    for encoded, decode in [
        (part(0).encoded, PartManifest.decode),
        (merge([part(0, 1)]).encoded, Manifest.decode),
        (Committed.of(merge([part(0, 1)])).encoded, Committed.decode),
    ]:
        body = encoded[checksummed._PREFIX :].replace(b'"schema":1', b'"schema":2')
        newer = b'{"check":"' + checksummed.digest(body).encode() + b'",' + body
        with pytest.raises(CheckpointTooNew, match="schema 2"):
            decode(newer, where="x")


def test_the_marker_admits_only_its_own_manifest() -> None:
    manifest, other = merge([part(0), part(1)]), merge([part(0, step=13), part(1, step=13)])
    marker = Committed.of(manifest)
    with pytest.raises(CheckpointCorrupt, match="not the one"):
        marker.admit(other.encoded, where="x")
    with pytest.raises(CheckpointCorrupt, match="not the one"):
        marker.admit(manifest.encoded[:-1], where="x")
    with pytest.raises(CheckpointCorrupt, match="another save"):
        dataclasses.replace(marker, step=13).admit(manifest.encoded, where="x")
    stranger = dataclasses.replace(part(0), values=None)
    with pytest.raises(CheckpointCorrupt, match="differs from the one"):
        manifest.check_part(stranger, stranger.encoded)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_no_single_damage_passes(data: Any) -> None:
    kinds = [part(0), merge([part(0), part(1)]), Committed.of(merge([part(0), part(1)]))]
    which = data.draw(st.sampled_from(kinds))
    whole = bytearray(which.encoded)
    at = data.draw(st.integers(0, len(whole) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "drop", "insert"]))
    if how == "flip":
        whole[at] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del whole[at:]
    elif how == "drop":
        del whole[at]
    else:
        whole[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    with pytest.raises(CheckpointCorrupt):
        type(which).decode(bytes(whole), where="x")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_forged_body_with_a_right_checksum_raises_our_errors_only(data: Any) -> None:
    """A hostile file can carry a right checksum: its fields must still be checked, never trusted."""
    which = data.draw(
        st.sampled_from([part(0), merge([part(0), part(1)]), Committed.of(merge([part(0), part(1)]))])
    )
    body = json.loads(which.encoded)
    body.pop("check")
    place: Any = body
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else list(range(len(place))))
        )
        inner = place[key]
        if isinstance(inner, dict | list) and inner and data.draw(st.booleans()):
            place = inner
            continue
        place[key] = data.draw(json_values)
        break
    try:
        tail = json.dumps(body, separators=(",", ":"))[1:].encode()
    except UnicodeEncodeError:
        return
    forged = b'{"check":"' + checksummed.digest(tail).encode() + b'",' + tail
    try:
        found = type(which).decode(forged, where="x")
    except (CheckpointCorrupt, CheckpointTooNew):
        return
    assert type(which).decode(found.encoded, where="x") == found


def test_names_of_folders() -> None:
    assert folder_name(1200, 3) == "step-00001200.a0003"
    assert parse_folder_name("step-00001200.a0003") == (1200, 3)
    assert parse_folder_name(folder_name(123456789, 12345)) == (123456789, 12345)
    for wrong in (
        "step-1200.a3",
        "step-00001200.a0003/",
        "step-000001200.a0003",
        "x",
        "step-00001200",
        ".aside",
    ):
        assert parse_folder_name(wrong) is None
    assert stored_name("w", 0) == "w"
    assert stored_name("w", 2) == "w#2"


def test_checksums_must_fit_the_length() -> None:
    record = FileRecord("rank-00000.safetensors", CHUNK_BYTES + 1, ("0" * 16, "1" * 16))
    fields = checksummed.Fields({"file": record.as_json()}, "x").fields("file")
    assert FileRecord.from_json(fields) == record
    for change in (
        {"checksums": "0" * 16},
        {"checksums": "g" * 32},
        {"algorithm": "md5"},
        {"chunk_bytes": 0},
    ):
        with pytest.raises(CheckpointCorrupt):
            FileRecord.from_json(checksummed.Fields({"file": record.as_json() | change}, "x").fields("file"))


ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda t: (min(t), max(t))), max_size=8
)


@given(ranges)
def test_ranges_hold_the_same_samples_as_a_set(given_ranges: list[tuple[int, int]]) -> None:
    made = normalize(given_ranges)
    assert {i for a, b in made for i in range(a, b)} == {i for a, b in given_ranges for i in range(a, b)}
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(made))
    assert all(a < b for a, b in made)
    p = Position(1, made)
    assert p.consumed() == sum(b - a for a, b in made)
    assert read_position(json.loads(json.dumps(p.as_json())), "x") == p


def test_positions_merge_to_the_union() -> None:
    a, b = Position(0, ((0, 4), (8, 12)), ((20, 22),)), Position(0, ((4, 8),), ((30, 31),))
    assert merged([a, b], where="x") == Position(0, ((0, 12),), ((20, 22), (30, 31)))
    assert merged([a, a], where="x") == a
    with pytest.raises(CheckpointCorrupt):
        merged([a, dataclasses.replace(b, fingerprint="other data")], where="x")
    assert a.skipping(16, 18) == Position(0, ((0, 4), (8, 12)), ((16, 18), (20, 22)))
    for wrong in ([[4, 2]], [[0, 4], [3, 6]], [[5, 6], [0, 1]], [[0, 1, 2]], "x", [[0.5, 1]]):
        with pytest.raises(CheckpointCorrupt):
            read_position(a.as_json() | {"samples": wrong}, "x")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_runs_hold_exactly_the_shards(data: Any) -> None:
    shards, builder = [], RunBuilder()
    for rank in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 5)) == 0:
            continue
        for i in range(data.draw(st.integers(1, 2))):
            at = (data.draw(st.sampled_from([rank * 2, rank, 7])), 0)
            shards.append(
                TensorShard(rank, at, (2, 3), data.draw(st.sampled_from([0, 0, 0, 8])), stored_name("w", i))
            )
            builder.add(shards[-1])
    back = [s for run in builder.finish() for s in run.shards()]
    assert sorted(back, key=lambda s: (s.rank, s.stored)) == shards


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_runs_tile_as_their_shards_do(data: Any) -> None:
    number = st.integers(0, 4)
    runs = data.draw(
        st.lists(
            st.builds(
                ShardRun, st.just(0), st.integers(1, 4), st.tuples(number, st.just(0)),
                st.tuples(st.integers(0, 3), st.sampled_from([2, 2, 1])),
                st.tuples(st.integers(-2, 3), st.sampled_from([0, 0, 1])), st.just(0), st.just("w"),
            ),
            min_size=1, max_size=3,
        )
    )  # fmt: skip
    shape = (data.draw(st.integers(0, 8)), 2)
    boxes = [s.box for r in runs for s in r.shards()]
    assert (gap_in_runs(shape, runs) is None) == (gap_in(shape, boxes) is None)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_tiling_is_decided_as_by_counting_cells(data: Any) -> None:
    shape = (data.draw(st.integers(0, 5)), data.draw(st.integers(0, 4)))
    box = st.tuples(
        st.tuples(st.integers(0, 4), st.integers(0, 3)), st.tuples(st.integers(0, 4), st.integers(0, 4))
    )
    boxes = data.draw(st.lists(box, max_size=5))
    if data.draw(st.booleans()) and shape[0]:  # a true tiling, with replicas
        cut = data.draw(st.integers(0, shape[0]))
        boxes = [((0, 0), (cut, shape[1])), ((cut, 0), (shape[0] - cut, shape[1])), ((0, 0), (cut, shape[1]))]
    cells: dict[tuple[int, int], int] = {}
    outside = False
    for (r, c), (h, w) in set(boxes):
        outside |= r + h > shape[0] or c + w > shape[1]
        for i in range(r, r + h):
            for j in range(c, c + w):
                cells[i, j] = cells.get((i, j), 0) + 1
    want = {(i, j): 1 for i in range(shape[0]) for j in range(shape[1])}
    assert (gap_in(shape, boxes) is None) == (not outside and cells == want)


def test_it_says_what_its_attempt_went_on_from() -> None:
    parts = [part(r, went_on=(2, 310)) for r in range(2)]
    manifest = merge(PartManifest.decode(p.encoded, where="x") for p in parts)
    assert manifest.went_on == (2, 310) == Manifest.decode(manifest.encoded, where="x").went_on
    assert b"went_on" not in merge(part(r) for r in range(2)).encoded, "as it was before"


@pytest.mark.parametrize("wrong", [[1], [1, -2], "x", [1, True], [1, 2, 3], {}])
def test_what_it_went_on_from_cannot_be_anything(wrong: Any) -> None:
    torn = json.loads(part(0).encoded) | {"went_on": wrong}
    body = {k: v for k, v in torn.items() if k not in ("check", "kind", "schema")}
    with pytest.raises(CheckpointCorrupt, match="went_on"):
        PartManifest.decode(checksummed.encode_checked("unbroken.checkpoint.part", body), where="x")
