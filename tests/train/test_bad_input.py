"""What would fail or be wrong later is refused before the first step, with the legal values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from unbroken.errors import InputError, UsageError
from unbroken.train.config import parse
from unbroken.train.corpus.tokens import open_tokens
from unbroken.train.parallel.attention import choose_attention
from unbroken.train.planning.layout import check
from unbroken.train.trainer import check_same_training, training_values
from unbroken.train.training import open_corpus

SMALL = [
    "--dim",
    "32",
    "--heads",
    "4",
    "--kv-heads",
    "4",
    "--layers",
    "4",
    "--hidden",
    "64",
    "--seq",
    "32",
    "--global-batch",
    "8",
]


@pytest.mark.parametrize(
    ("plan", "ranks", "why", "legal"),
    [
        (["--tensor", "3"], 8, "does not divide 8 ranks", "1, 2, 4, 8"),
        (["--tensor", "8"], 8, "does not divide --heads 4", "1, 2, 4"),
        (["--parameters", "3"], 8, "--parameters 3", "1, 2, 4, 8"),
        (["--parameters", "4", "--optimizer", "2"], 8, "--optimizer 2", "4, 8"),
        (["--pipeline", "8"], 8, "the model has 4 layers", "At most 4"),
        (["--context", "2", "--seq", "30"], 4, "--seq 30 does not split", "28, 32"),
        (["--optimizer", "-1", "--global-batch", "6"], 4, "--global-batch 6 does not divide", "4, 8"),
        (["--micro-batch", "3", "--optimizer", "-1"], 2, "does not divide a rank's share of 4", "1, 2, 4"),
        (["--pipeline", "2", "--tensor", "2"], 3, "does not divide 3 ranks", "1, 3"),  # fewer GPUs than the plan
        (["--pipeline", "2", "--tensor", "4"], 4, "8 ranks do not divide the 4 ranks", "multiple of 8"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_and_fewer_gpus(plan: list[str], ranks: int, why: str, legal: str) -> None:
    with pytest.raises(UsageError) as e:
        check(parse([*SMALL, *plan]), ranks)
    assert why in e.value.message and legal in (e.value.hint or ""), str(e.value)


def test_a_tokenizer_that_does_not_match(tmp_path: Path) -> None:
    np.arange(400, dtype=np.uint16).tofile(tmp_path / "x.ds")
    np.array([400], np.uint64).tofile(tmp_path / "x.ds.index")
    with pytest.raises(InputError, match="token 399 is not in a vocabulary of 300") as e:
        open_corpus(parse(["--data", str(tmp_path / "x.ds"), "--vocab", "300", "--cache", str(tmp_path)]))
    assert "--vocab 400" in (e.value.hint or "")


def test_a_tokenizer_for_plain_text_is_told_where_it_belongs() -> None:
    with pytest.raises(UsageError, match="is for --task sft and dpo") as e:
        parse(["--tokenizer", "somewhere"])
    assert "unbroken train tokenize" in (e.value.hint or "")


def test_data_that_changed_since_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("words " * 1000)
    config = parse([*SMALL, "--data", str(folder), "--cache", str(tmp_path / "cache")])
    saved = training_values(config, 5, open_tokens(str(folder), tmp_path / "cache"), None)
    check_same_training(config, open_tokens(str(folder), tmp_path / "cache"), 5, saved)
    (folder / "a.txt").write_text("others " * 1000)
    with pytest.raises(InputError, match="its text files were changed"):
        check_same_training(config, open_tokens(str(folder), tmp_path / "cache"), 5, saved)


def test_an_attention_kernel_that_the_device_lacks() -> None:
    config = parse([*SMALL, "--attention", "cudnn"])
    with pytest.raises(UsageError, match="--attention cudnn does not run on cpu") as e:
        choose_attention(config, torch.device("cpu"), 0)
    assert "Legal here: auto," in (e.value.hint or "") and "math" in (e.value.hint or "")
