"""The step digests of a run: the last execution of a step counts, and every difference is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unbroken.errors import InputError
from unbroken.train.step_digests import StepDigestWriter, digest, read_step_digests, step_digest_path


def test_the_last_execution_counts_and_a_torn_line_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "w.jsonl"
    w = StepDigestWriter(path, rank=0, attempt=1)
    w.step(1, 2.5, b"a")
    w.step(2, 9.0, b"b")
    w.close()
    with open(path, "ab") as f:
        f.write(b'{"attempt": 1, "rank": 0, "st')
    w = StepDigestWriter(path, rank=0, attempt=2)
    w.step(2, 2.0, b"b")
    w.final(2, "p", "o")
    w.close()
    seen = read_step_digests(path)
    assert seen.losses == {1: (2.5).hex(), 2: (2.0).hex()}
    assert (seen.executions, seen.attempts, seen.torn, seen.parameters) == (3, {1, 2}, 1, "p")


def test_every_difference_is_found(tmp_path: Path) -> None:
    def step_digests(
        name: str, loss: float = 2.0, batch: bytes = b"b", parameters: str = "p", steps: int = 2
    ) -> Path:
        w = StepDigestWriter(tmp_path / name, 0, 1)
        for s in range(1, steps + 1):
            w.step(s, loss, batch)
        w.final(steps, parameters, "o")
        w.close()
        return tmp_path / name

    one = read_step_digests(step_digests("a"))
    assert one.same_as(read_step_digests(step_digests("b"))) and one.difference(one) is None
    for i, (other, word) in enumerate(
        [
            ({"loss": 2.0000000000000004}, "losses"),
            ({"batch": b"c"}, "batches"),
            ({"parameters": "q"}, "parameters"),
            ({"steps": 3}, "step 3"),
        ]
    ):
        w = read_step_digests(step_digests(f"x{i}", **other))  # type: ignore[arg-type]
        assert not one.same_as(w) and word in (one.difference(w) or "")


def test_names(tmp_path: Path) -> None:
    assert step_digest_path("d/w-{rank}.jsonl", 3, 4) == Path("d/w-3.jsonl")
    assert step_digest_path("d/w.jsonl", 3, 4) == Path("d/w.3.jsonl")
    assert step_digest_path("d/w.jsonl", 0, 1) == Path("d/w.jsonl")
    with pytest.raises(InputError):
        read_step_digests(tmp_path / "absent")
    with pytest.raises(InputError):
        StepDigestWriter(tmp_path, 0, 0)


def test_the_digest_sees_names_types_shapes_and_bits() -> None:
    a = {"x": torch.arange(4.0), "y": torch.zeros(2, dtype=torch.bfloat16)}
    assert digest(a) == digest(dict(reversed(a.items())))
    others = [
        {"x": torch.arange(4.0), "z": a["y"]},
        {"x": torch.arange(4.0).view(2, 2), "y": a["y"]},
        {"x": torch.arange(4), "y": a["y"]},
        {"x": torch.tensor([0.0, 1.0, 2.0, 3.0000002]), "y": a["y"]},
        {"x": torch.tensor([-0.0, 1.0, 2.0, 3.0]), "y": a["y"]},
    ]
    assert len({digest(o) for o in [a, *others]}) == 6


def test_a_full_disk_ends_the_trace_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    w = StepDigestWriter(tmp_path / "w.jsonl", 0, 1)
    w.step(1, 2.0, b"a")
    with monkeypatch.context() as m:
        m.setattr("os.write", full)
        w.step(2, 2.0, b"a")
        w.step(3, 2.0, b"a")
    w.step(4, 2.0, b"a")
    w.close()
    assert set(read_step_digests(tmp_path / "w.jsonl").losses) == {1}
    assert capsys.readouterr().err.count("No space left") == 1
