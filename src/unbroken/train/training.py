"""What the step loop asks of a trainer, and which one a configuration means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UsageError
from ..progress import Run
from .config import TrainConfig
from .corpus.chat import Conversations, open_conversations, open_preferences
from .corpus.mixture import MixedOrder, TokenMixture, is_mixture, open_mixture
from .corpus.order import SampleOrder, SamplePosition
from .corpus.samples import CorpusSamples, TrainingCorpus
from .corpus.token_files import is_token_file, open_token_file
from .corpus.tokens import Tokens, open_tokens
from .world import World, check_share

if TYPE_CHECKING:
    from torch import Tensor


class Training(Protocol):
    """One rank of a training."""

    config: TrainConfig
    world: World
    run: Run
    position: SamplePosition
    step: int
    """Steps completed."""
    busy: float
    """Seconds of the last step in which this rank did not wait for others; NaN where that is not known."""

    @property
    def order(self) -> SampleOrder | MixedOrder:
        """Which sample comes when."""

    @property
    def tokens(self) -> TrainingCorpus:
        """What is trained on."""

    @property
    def samples(self) -> CorpusSamples:
        """The data set as samples."""

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model."""

    def state(self) -> dict[str, Any]:
        """The state as a checkpoint keeps it; its tensors are the live ones."""

    def resume(self, step: int, training: dict[str, Any], position: SamplePosition) -> None:
        """Goes on from a checkpoint whose tensors are loaded already; raises InputError if it is of another training."""

    def train_step(
        self, wait_for_copies: Callable[[], None], stop: bool
    ) -> tuple[float, Tensor, bool, bytes]:
        """One update. Returns (mean loss of the global batch, gradient norm, whether any rank wants to stop, this rank's
        tokens)."""

    def evaluate(self) -> float:
        """The mean loss on the held-out samples, the same on every rank."""

    def final_tensors(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """What this rank holds at the end: parameters, and optimizer state, by name."""


def open_corpus(config: TrainConfig) -> Tokens | Conversations | TokenMixture:
    """What is trained on. Raises InputError for what cannot be read, UsageError where it does not go with the trainer."""
    c, cache = config.data, Path(config.data.cache) if config.data.cache else None
    if c.task == "sft":
        return open_conversations(Path(c.data).expanduser(), c.seq, c.tokenizer, config.model.vocab)
    if c.task == "dpo":
        return open_preferences(Path(c.data).expanduser(), c.seq, c.tokenizer, config.model.vocab)
    if is_mixture(c.data):
        return open_mixture(c.data, c.seq, lambda source: _open(source, config.model.vocab, cache))
    return _open(c.data, config.model.vocab, cache)


def _open(source: str, vocab: int, cache: Path | None) -> Tokens:
    return open_token_file(source, vocab, cache) if is_token_file(source) else open_tokens(source, cache)


def open_training(
    config: TrainConfig, world: World, run: Run, tokens: Tokens | Conversations | TokenMixture
) -> Training:
    """A rank at step 0: of the reference trainer, or of a plan. Raises UsageError, InputError."""
    if config.wants_plan or (isinstance(tokens, Tokens) and tokens.mask is not None):
        from .parallel.trainer import build as build_plan

        return build_plan(config, world, run, tokens)
    from .trainer import build

    assert isinstance(tokens, Tokens), "conversations are for plans alone"
    return build(config, world, run, tokens)


def check_sizes(config: TrainConfig, sizes: Sequence[int]) -> None:
    """Raises UsageError, with the legal values, where a run may go on with so many ranks (--min-nodes) and this training cannot: told
    before its first step, not when a node is lost."""
    for size in sizes:
        try:
            if config.wants_plan:
                from .planning.layout import check

                check(config, size)
            else:
                check_share(config.data.global_batch, size)
        except UsageError as e:
            raise UsageError(
                f"with {size} ranks, which --min-nodes allows ({', '.join(map(str, sizes))}): {e.message}",
                hint=e.hint,
            ) from None


OpenTraining = Callable[[TrainConfig, World, Run, Any], Training]
"""As `open_training`."""
OpenCorpus = Callable[[TrainConfig], TrainingCorpus]
"""As `open_corpus`."""
