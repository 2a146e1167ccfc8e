"""What `unbroken train` refuses in one line stops a run; what only looks so does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.diagnose import Action, Facts, RankExit, diagnose
from unbroken.progress import Budgets
from unbroken.progress.records.verdict import Category, Verdict
from unbroken.recover.decide.policy import decide, fingerprint

UNKNOWN_OPTION = "unbroken train: UnknownKey: unknown option '--tenser'. Did you mean '--tensor'?"
LAYOUT = "unbroken train: LayoutMismatch: tensor 'w' has shape [256, 64] in the checkpoint, [256, 128] here (step-00000003.a0001)."
PEER = 'step 1 loss 2.0\nTraceback (most recent call last):\n  File "torch/distributed/c10d.py", line 9, in barrier\n    go()\n'
GLOO = PEER + "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:33312"
STORE = PEER + "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"


def judge(folder: Path, logs: dict[int, str], codes: dict[int, int], at: dict[int, float]) -> Verdict:
    paths = []
    for rank, text in logs.items():
        path = folder / "node-000" / f"rank-{rank}.log"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
        paths.append(path)
    exits = tuple(
        RankExit(r, "node-000", c, None, at[r], False, at[r] - 0.01, at[r]) for r, c in codes.items()
    )
    return diagnose(paths, facts=Facts(exits=exits, nodes=tuple((r, "node-000") for r in logs)))


def decided(v: Verdict, n: int = 2) -> tuple[Action, str]:
    facts = Facts(nodes=tuple((r, "node-000") for r in range(n)))
    d = decide(v, facts, (), Budgets(), 0)
    return d.action, d.why


@pytest.mark.parametrize(
    "line",
    [
        UNKNOWN_OPTION,
        LAYOUT,
        "unbroken train: UsageError: --dim 65 does not split into 4 heads of an even width.",
        "unbroken train: UsageError: --global-batch 7 does not divide among 2 ranks. Ranks that fit: 1, 7.",
        "unbroken train: InputError: there is no text to train on (--data nowhere). Name a folder or a file.",
        "unbroken train: InputError: the checkpoint is of another training: its text files were changed since, or --data names others (checkpoint of step 3).",
        "unbroken train: MissingExtra: a tokenizer of Hugging Face needs transformers, which is not installed.",
    ],
)
def test_a_refusal_stops_at_once_and_is_quoted(tmp_path: Path, line: str) -> None:
    v = judge(tmp_path, {0: line, 1: line}, {0: 2, 1: 2}, {0: 100.0, 1: 100.0})
    assert (v.title, v.category, v.action, v.recoverable) == ("Refused", Category.SCRIPT, Action.STOP, False)
    assert v.root is not None and v.root.text == line and v.confidence >= 0.8
    action, why = decided(v)
    assert action is Action.STOP and line in why


@pytest.mark.parametrize("peer", [GLOO, STORE])
@pytest.mark.parametrize("first", [0, 1])
def test_who_refused_wins_over_the_connection_that_a_peer_lost(tmp_path: Path, peer: str, first: int) -> None:
    at = {first: 100.0, 1 - first: 100.4}
    v = judge(tmp_path, {0: peer, 1: LAYOUT}, {0: 1, 1: 36}, at)
    assert v.title == "Refused" and v.action is Action.STOP
    assert v.root is not None and v.root.text == LAYOUT and v.root.rank == 1


@pytest.mark.parametrize(
    "line",
    [
        "config is wrong",
        "hydra: UsageError: unknown option '--tenser'",
        "my unbroken train: UsageError: as quoted by a wrapper",
        "unbroken train: StorageError: the object store did not answer (s3://b/x).",
        "INFO unbroken train: the option is a UsageError in versions to come",
    ],
)
def test_a_line_that_only_looks_so_does_not(tmp_path: Path, line: str) -> None:
    v = judge(tmp_path, {0: line, 1: line}, {0: 2, 1: 2}, {0: 100.0, 1: 100.0})
    assert v.title != "Refused"
    assert decided(v)[0] is not Action.STOP


@pytest.mark.parametrize(
    "why",
    ["Connection timed out", "Stale file handle", "Input/output error", "Resource temporarily unavailable"],
)
def test_a_file_system_that_was_away_is_no_mistake_of_the_script(tmp_path: Path, why: str) -> None:
    line = f"unbroken train: InputError: a file of the text cannot be read: {why} (/mnt/text/a.txt)."
    v = judge(tmp_path, {0: line, 1: line}, {0: 3, 1: 3}, {0: 100.0, 1: 100.0})
    assert decided(v)[0] is not Action.STOP


def test_a_refusal_that_training_went_on_after_is_none(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(
        "\n".join(
            [UNKNOWN_OPTION, *(f"step {i} loss {3 - i / 100:.3f}" for i in range(1, 30)), "KeyError: 'w'"]
        )
    )
    assert diagnose([tmp_path]).title == "KeyError"


def test_last_lines_of_ranks_that_ended_alike_are_told_and_decide_nothing(tmp_path: Path) -> None:
    said = {0: "config is wrong: no column text", 1: "config is wrong: no column label"}
    v = judge(tmp_path, said, {0: 1, 1: 1}, {0: 100.0, 1: 100.0})
    assert all(text in v.last_words for text in said.values())
    others = judge(tmp_path, {0: "a", 1: "b"}, {0: 1, 1: 1}, {0: 100.0, 1: 100.0})
    assert fingerprint(v) == fingerprint(others) and decided(v)[0] is decided(others)[0] is Action.RESTART
    same = judge(tmp_path, dict.fromkeys(said, said[0]), {0: 1, 1: 1}, {0: 100.0, 1: 100.0})
    assert same.last_words == f"last line of ranks 0, 1: {said[0]}"
