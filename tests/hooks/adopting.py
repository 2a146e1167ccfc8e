"""Three trainings in one process: the framework's own until step 6; with our hook from its checkpoint of step 4; and without our
hook again from a checkpoint that it wrote meanwhile. Prints a line before each.

    python -m tests.hooks.adopting transformers|lightning|accelerate FOLDER
"""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

PHASES = {"own": (None, 6), "adopted": (4, -1), "back": (16, -1)}
"""The step of the checkpoint that each begins from, and the last step (-1: two epochs)."""


def transformers(folder: Path) -> None:
    import transformers_trainer as example

    arguments, attach, printing = example.TrainingArguments, example.attach, example.Printing
    for phase, (start, last) in PHASES.items():

        class FromOwn(printing):  # type: ignore[misc, valid-type]
            def train(self, start: Any = start, **_: Any) -> Any:
                return super().train(
                    resume_from_checkpoint=str(folder / "out" / f"checkpoint-{start}") if start else None
                )

        def made(last: int = last, **how: Any) -> Any:
            return arguments(**{**how, "save_strategy": "steps", "save_steps": 4, "max_steps": last, "dataloader_num_workers": 0})  # fmt: skip

        example.TrainingArguments, example.Printing = made, FromOwn
        example.attach = attach if phase == "adopted" else lambda *_, **__: None
        print(f"phase {phase}", flush=True)
        example.main()


def lightning(folder: Path) -> None:
    import lightning_fit as example
    from lightning.pytorch.callbacks import ModelCheckpoint

    trainer = example.L.Trainer
    for phase, (start, last) in PHASES.items():

        def made(phase: str = phase, start: Any = start, last: int = last, **how: Any) -> Any:
            saving = ModelCheckpoint(folder / "own", "{step}", every_n_train_steps=4, save_top_k=-1)
            callbacks = [*how.pop("callbacks"), saving] if phase == "adopted" else [saving]
            found = trainer(
                **{**how, "callbacks": callbacks, "enable_checkpointing": True, "max_steps": last}
            )
            path = str(folder / "own" / f"step={start}.ckpt") if start else None
            found.fit = functools.partial(found.fit, ckpt_path=path, weights_only=False)
            return found

        example.L.Trainer = made
        print(f"phase {phase}", flush=True)
        example.main()


def accelerate(folder: Path) -> None:
    import accelerate_loop as example
    from accelerate import skip_first_batches

    attach = example.attach

    class Over(Exception):
        """The phase has made its steps."""

    class Saving:
        """The script's own checkpoints, each fourth step: accelerate leaves the place in the data to the script."""

        def __init__(self, accelerator: Any, loader: Any, start: int, last: int) -> None:
            self.accelerator, self.loader, self.step, self.last = accelerator, loader, start, last

        def __iter__(self) -> Any:
            for number, batch in enumerate(self.loader, 1):
                yield batch
                self.step += number % 2 == 0
                if number % 2 == 0 and self.step % 4 == 0:
                    self.accelerator.save_state(str(folder / f"own-{self.step}"))
                if self.step == self.last:
                    raise Over

    class Rest:
        """The loader as accelerate tells to write it: epochs that are done have no batch, of the present one some are skipped."""

        def __init__(self, loader: Any, batches: int) -> None:
            self.loader, (self.epochs, self.batches) = loader, divmod(batches, len(loader))

        def __iter__(self) -> Any:
            self.epochs -= 1
            if self.epochs == -1:
                yield from skip_first_batches(self.loader, self.batches)
            elif self.epochs < 0:
                yield from self.loader

    for phase, (start, last) in PHASES.items():

        def made(accelerator: Any, loader: Any, phase: str = phase, start: Any = start, last: int = last, **how: Any) -> Any:  # fmt: skip
            own = str(folder / f"own-{start}")
            if phase == "adopted":
                loader = attach(accelerator, loader, **how)
                if loader.step == 0:  # there is no checkpoint of ours yet
                    accelerator.load_state(own)
                    loader.start_from(epoch=0, step=start, batches=2 * start)
            elif start:
                accelerator.load_state(own)
                loader = Rest(loader, 2 * start)
            return Saving(accelerator, loader, start or 0, last)

        example.attach = made
        print(f"phase {phase}", flush=True)
        with contextlib.suppress(Over):
            example.main()


if __name__ == "__main__":
    framework, folder = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "hooks"))
    sys.argv = [framework, "--out", str(Path(folder) / "out"), "--epochs", "2"]
    {"transformers": transformers, "lightning": lightning, "accelerate": accelerate}[framework](Path(folder))
