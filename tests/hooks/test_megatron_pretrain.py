"""Megatron's own trainer with two lines of ours, DistributedOptimizer in bf16 on two ranks by gloo: killed twice, every loss as undisturbed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from . import exact

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]
ON_CPU = Path(__file__).parent / "on_cpu" / "pretrain.py"
SCRIPT = str(exact.EXAMPLES / "megatron_pretrain.py")
OPTIONS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 12 --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --use-cpu-initialization --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 1 --log-interval 1 --eval-interval 6 "
    "--eval-iters 1 --dataloader-type cyclic --num-workers 2 --distributed-backend gloo"
)


@pytest.mark.parametrize(
    ("ranks", "kill_at"),
    [
        pytest.param(1, (9,), id="1 rank, second epoch"),
        pytest.param(2, (4, 9), id="2 ranks, both epochs", marks=pytest.mark.soak),
    ],
)
def test_exact_after_kill_nine(tmp_path: Path, ranks: int, kill_at: tuple[int, ...]) -> None:
    """Its own loop, schedule, shuffled order and evaluation; dropout, two workers, several batches a step, weights that are gathered in
    the next forward pass. Five steps are an epoch."""
    if not (Path(sys.prefix) / "megatron" / "megatron" / "training").exists():
        pytest.skip("needs megatron-core 0.19 with its trainer: make install-hooks")
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    undisturbed, _ = exact.torchrun(tmp_path / "one", ON_CPU, SCRIPT, *OPTIONS, ranks=ranks)
    made, code = exact.supervised(tmp_path / "two", ON_CPU, SCRIPT, *OPTIONS, ranks=ranks, kill_at=kill_at)
    assert code == 0
    exact.check_exact(undisturbed, made, len(kill_at))
