"""trl's SFTTrainer with two lines of ours (marked +): killed at any moment, the same command goes on, bit for bit.

unbroken run --nproc 2 -- examples/hooks/trl_sft.py --out runs/sft
torchrun --nproc-per-node 2 examples/hooks/trl_sft.py --out runs/sft
"""

import argparse
import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from unbroken.hooks.transformers import attach  # +


def words() -> PreTrainedTokenizerFast:
    """A tokenizer without a network: 62 words."""
    known = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "<eos>": 63}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def conversations(rows: int = 88) -> Dataset:
    """Prompts and completions of several lengths."""
    drawn = random.Random(0)

    def text(least: int, most: int) -> str:
        return "".join(f" w{drawn.randrange(62)}" for _ in range(drawn.randint(least, most)))

    return Dataset.from_dict(
        {"prompt": [text(3, 8) for _ in range(rows)], "completion": [text(2, 6) for _ in range(rows)]}
    )


class Printing(SFTTrainer):
    """Prints each micro-batch's loss, so that two runs can be compared."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        print(
            f"rank {self.args.process_index} step {self.state.global_step + 1} loss {loss.item().hex()}",
            flush=True,
        )
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="trainer_output")
    parser.add_argument("--epochs", type=float, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    args = SFTConfig(
        output_dir=options.out, num_train_epochs=options.epochs, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        dataloader_num_workers=2, learning_rate=1e-3, logging_steps=3, eval_strategy="epoch", save_strategy="no",
        report_to="none", use_cpu=not gpu, bf16=gpu, disable_tqdm=True, max_length=16, seed=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    trainer = Printing(
        model=model,
        args=args,
        train_dataset=conversations(),
        eval_dataset=conversations(16),
        processing_class=words(),
    )
    attach(trainer, snapshot_every=2, persist_every=4)  # +
    trainer.train()
    torch.distributed.is_initialized() and torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
