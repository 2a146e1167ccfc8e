"""Megatron's own trainer with two lines of ours (marked +): killed at any moment, the same command goes on, bit for bit.

unbroken run --nproc 2 -- examples/hooks/megatron_pretrain.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 ...
(all options that it needs: tests/hooks/test_megatron_pretrain.py)
"""

from functools import partial

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from torch.utils.data import Dataset

from unbroken.hooks.megatron import attach  # +


class Text(Dataset):
    """Sequences of tokens."""

    def __init__(self, samples: int, length: int) -> None:
        self.tokens = torch.randint(0, 63, (samples, length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens[i, :-1], "labels": self.tokens[i, 1:]}


def datasets(samples: list[int]) -> tuple[Dataset, Dataset, None]:
    length = get_args().seq_length
    return Text(40, length), Text(16, length), None


datasets.is_distributed = True


def build(pre_process: bool = True, post_process: bool = True, **_: object) -> GPTModel:
    args = get_args()
    config = core_transformer_config_from_args(args)
    return GPTModel(
        config, get_gpt_layer_local_spec(), args.padded_vocab_size, args.seq_length, pre_process=pre_process,
        post_process=post_process, position_embedding_type="learned_absolute",
    )  # fmt: skip


def mean(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, tokens = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    rank, step = torch.distributed.get_rank(), get_args().curr_iteration + 1
    if losses.requires_grad:
        print(f"rank {rank} step {step} loss {total.item().hex()}", flush=True)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward(batches, model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
    batch = {name: t.cuda() for name, t in next(batches).items()}
    places = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device).expand_as(batch["tokens"])
    return model(batch["tokens"], places, None, labels=batch["labels"]), mean


def main() -> None:
    config = pretrain_cfg_container_from_args(parse_and_validate_args())
    attach(snapshot_every=2, persist_every=4)  # +
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward, model_provider=build)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
