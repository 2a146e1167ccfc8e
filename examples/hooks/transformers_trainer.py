"""Hugging Face's Trainer with two lines of ours (marked +): killed at any moment, the same command goes on, bit for bit.

unbroken run --nproc 2 -- examples/hooks/transformers_trainer.py --out runs/gpt2
torchrun --nproc-per-node 2 examples/hooks/transformers_trainer.py --out runs/gpt2
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from unbroken.hooks.transformers import attach  # +


class Text(Dataset):
    """Sequences of tokens; a tenth of them is replaced at random each time that one is asked for."""

    def __init__(self, samples: int = 88) -> None:
        self.tokens = torch.randint(0, 64, (samples, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        noise = torch.where(torch.rand(16) < 0.1, torch.randint(0, 64, (16,)), self.tokens[i])
        return {"input_ids": noise, "labels": self.tokens[i]}


class Printing(Trainer):
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
    args = TrainingArguments(
        output_dir=options.out, num_train_epochs=options.epochs, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, dataloader_num_workers=2, learning_rate=1e-3, logging_steps=3, eval_strategy="epoch",
        save_strategy="no", report_to="none", use_cpu=not torch.cuda.is_available(), disable_tqdm=True, seed=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    trainer = Printing(model=model, args=args, train_dataset=Text(), eval_dataset=Text(16))
    attach(trainer, snapshot_every=2, persist_every=4)  # +
    trainer.train()
    torch.distributed.is_initialized() and torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
