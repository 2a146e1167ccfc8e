"""Lightning: one callback, and a kill costs the steps since the last snapshot. Both packages, `lightning` and `pytorch_lightning`.

    from unbroken.hooks.lightning import UnbrokenCallback

    trainer = Trainer(max_epochs=3, callbacks=[UnbrokenCallback()])
    trainer.fit(model, loader)

The training data comes through unbroken.data, with an ordinary DataLoader too: Lightning's own resume begins its epoch again.
What ModelCheckpoint saves stays as it is; `fit(ckpt_path=...)` counts until there is a checkpoint of ours.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module, util
from pathlib import Path
from typing import Any

from ..data import Loader
from ..errors import MissingExtra
from .states import lightning as states
from .steps import StepLoader, keep_place
from .training import HookedTraining, Values, check_version, folder_of

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _packages() -> list[Any]:
    """Those that the script has imported, or else the first that is installed: they are the same code twice, and the
    classes of one are not those of the other."""
    found = [p for p in _PACKAGES if p in sys.modules]
    found = found or [p for p in _PACKAGES if util.find_spec(p.partition(".")[0]) is not None][:1]
    if not found:
        raise MissingExtra("lightning", "hooks-lightning", what="the hook of Lightning")
    for package in found:
        check_version(package.partition(".")[0].replace("_", "-"), "2.6", "hooks-lightning")
    return [import_module(p) for p in found]


_Callback: Any = type("_Callback", tuple(p.Callback for p in _packages()), {})


class LightningLoader(StepLoader):
    """A StepLoader without a state of its own: what Lightning itself saves stays readable without us."""

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return super().__getattr__(name)


class UnbrokenCallback(_Callback):  # type: ignore[misc]
    """Keeps the training of `fit`. `directory` and `options` are those of `unbroken.Checkpointer` (default: the run's own folder
    under `unbroken run`, else `unbroken` in the trainer's `default_root_dir`)."""

    def __init__(self, directory: str | Path | None = None, **options: Any) -> None:
        super().__init__()
        self.directory, self.options = directory, options
        self.training: HookedTraining | None = None
        self.loader: LightningLoader | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes its places in the trainer, before it makes its loaders. Raises UsageError for what cannot be kept."""
        if stage != "fit":
            return
        states.refuse_unkept(trainer)
        folder = folder_of(self.directory, trainer.default_root_dir)
        self.training = HookedTraining("lightning", folder, **self.options)
        source, connector = trainer.fit_loop._data_source, trainer._checkpoint_connector
        loop = trainer.fit_loop.epoch_loop
        make, restore, start = source.dataloader, connector.restore_training_state, loop.on_run_start

        def dataloader() -> Any:
            kept = keep_place(make(), seed=states.seed(), accumulate=trainer.accumulate_grad_batches)
            self.loader = LightningLoader(kept, self.training)  # type: ignore[arg-type]
            return self.loader

        def restore_training_state() -> None:
            restore()
            self._begin(trainer)

        def on_run_start(fetcher: Any) -> None:
            states.count_epoch(trainer, self.loader)
            start(fetcher)
            if self.training is not None and self.training.restored is not None:
                # It stands between two steps: nothing of a step before it is to be made up for.
                trainer.fit_loop.restarting = False

        source.dataloader, connector.restore_training_state = dataloader, restore_training_state
        loop.on_run_start, precision = on_run_start, trainer.precision_plugin
        precision.optimizer_step = states.update_after_backward(precision)
        self.training.during(loop.val_loop, "run", "evaluating")
        self.training.during(trainer, "save_checkpoint", "checkpointing")
        self._undo = [
            (source, "dataloader"), (connector, "restore_training_state"), (loop, "on_run_start"), (precision, "optimizer_step"),
            (loop.val_loop, "run"), (trainer, "save_checkpoint"),
        ]  # fmt: skip

    def _begin(self, trainer: Any) -> None:
        """Everything is built: restores it."""
        assert self.training is not None
        adopted = trainer._checkpoint_connector._ckpt_path if trainer.fit_loop.restarting else None
        trainer.fit_loop.setup_data()
        state: dict[str, Any] = {
            "module": trainer.lightning_module, "optimizers": list(trainer.optimizers),
            "schedulers": [c.scheduler for c in trainer.lr_scheduler_configs],
            "loops": Values(trainer.fit_loop.state_dict, trainer.fit_loop.load_state_dict),
            "callbacks": Values(lambda: states.show(trainer), lambda saved: states.load(trainer, saved)),
        }  # fmt: skip
        if self.loader is not None:
            state["loader"] = self.loader.loader
        if trainer.precision_plugin.state_dict():
            state["precision"] = trainer.precision_plugin
        if trainer.datamodule is not None and trainer.datamodule.state_dict():
            state["datamodule"] = trainer.datamodule
        # It is, by us: it has no state that Lightning knows of.
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable")
        if self.training.begin(state) is None and adopted and self.loader is not None:
            done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            if isinstance(self.loader.loader, Loader):
                epoch, batches = divmod(done, int(trainer.num_training_batches))
                self.loader.loader.start_from(epoch, trainer.global_step, batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Notes this rank's loss."""
        if self.training is not None:
            self.training.loss.note(outputs.get("loss") if isinstance(outputs, dict) else outputs)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Everything is durable before `fit` returns."""
        if self.loader is not None:
            self.loader.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """What was saved is made durable by the keeper; another hook may begin."""
        if self.training is not None:
            self.training.ended = True

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves the trainer as it was."""
        if stage == "fit" and self.training is not None:
            for owner, name in self._undo:
                vars(owner).pop(name, None)
            self.training.finish()
            self.training = self.loader = None
