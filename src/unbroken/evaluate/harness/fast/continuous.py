"""Generation by transformers' own continuous batching: each answer ends by itself, and the next one takes its place.

Its manager runs in a thread of its own, with paged attention, prefix sharing, and CUDA graphs where the card has them. Stop
strings are none of its concern: tokens are looked at as they come, and a request that has said one is cancelled.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import flash

PAGE = 32
"""Tokens of a page on a CPU; on a GPU transformers chooses."""
CPU_BYTES = 1 << 30
"""Memory for keys and values on a CPU."""
GPU_SHARE = 0.6
"""Of the free memory of a GPU; likelihoods need the rest."""
LONGEST_BY_PAGES = 65536
"""Tokens of a sequence that is read through a table of pages; one that grows beyond is read by its indices, slower."""
FIRST_S = 0.05
STALL_S = 300.0
"""So long may the manager make no step while it has requests."""


@dataclass(frozen=True)
class WantedAnswer:
    """One answer to generate."""

    key: Hashable
    tokens: tuple[int, ...]
    limit: int
    """New tokens at most."""
    stops: tuple[str, ...] = ()
    seconds: float = 0.0
    """At most so long, from its first token; 0: as long as it takes."""


@dataclass(frozen=True)
class Made:
    """The tokens of an answer."""

    key: Hashable
    tokens: tuple[int, ...]
    late: bool = False
    """Its time was over before it had ended."""


class Broken(Exception):
    """The manager cannot go on; what it held has to be asked in another way."""


@dataclass
class _Open:
    wanted: WantedAnswer
    began: float = 0.0
    """When its first token was there; before that it only waits for its turn."""
    seen: int = 0
    tokens: list[int] = field(default_factory=list)


class Continuous:
    """transformers' manager for one model, started with the first request."""

    def __init__(
        self,
        model: Any,
        decode: Callable[[Sequence[int]], str],
        tail_of: Callable[[str], int],
        *,
        longest: int,
        at_once: int,
        own_flash: bool = False,
        drawing: Mapping[str, float] | None = None,
    ) -> None:
        """`decode`: tokens to text with special tokens; `tail_of`: tokens that a stop string may take at the end of one;
        `longest`: tokens of a prompt with its answer; `at_once`: answers together; `own_flash`: attention by flash.py; `drawing`:
        temperature, top_p, top_k of texts that are drawn at random, greedy ones without.

        Raises Broken where this version, model or setting has no continuous batching.
        """
        self._model, self._decode, self._tail_of = model, decode, tail_of
        self._longest, self._at_once, self.own_flash = longest, at_once, own_flash
        self._open: dict[str, _Open] = {}
        self._count = 0
        self._manager: Any = None
        self._step, self._stepped = -1, time.monotonic()
        self._settings = copy.deepcopy(model.generation_config)
        self._drawing = dict(drawing or {})
        if self._drawing:
            self._settings.update(do_sample=True, num_beams=1, num_return_sequences=1, **self._drawing)
        else:
            self._settings.update(do_sample=False, num_beams=1, num_return_sequences=1, temperature=None, top_p=None, top_k=None)  # fmt: skip
        self._attention = model.config._attn_implementation
        check(model, self._settings)

    @property
    def open(self) -> int:
        """Answers that have not ended."""
        return len(self._open)

    @property
    def steps(self) -> int:
        """Grows as long as it works."""
        return int(getattr(self._manager, "current_batch", 0))

    def put(self, wanted: Sequence[WantedAnswer]) -> None:
        """Queues requests. Raises Broken."""
        if self._manager is None:
            self._start()
        for w in wanted:
            name = f"u{self._count}"
            self._count += 1
            # Tokens are sent as they come only where somebody has to look at them.
            streams = bool(w.stops) or w.seconds > 0
            said = self._manager.add_request(
                list(w.tokens), request_id=name, max_new_tokens=w.limit, streaming=streams
            )
            if said is None:
                raise Broken("it takes no more requests")
            self._open[name] = _Open(w)
        self._stepped = time.monotonic()

    def take(self, within_s: float) -> list[Made]:
        """Answers that have ended, as soon as there is one. Raises Broken, with the requests still open: see `give_up`."""
        latest: dict[str, Any] = {}
        done: list[Made] = []
        wait = within_s
        while (out := self._manager.get_result(timeout=wait)) is not None:
            latest[out.request_id] = out
            wait = 0.001
            if len(latest) >= len(self._open):
                break
        for name, out in latest.items():
            found = self._open.get(name)
            if found is None:
                continue  # cancelled; what it said since does not count
            if out.error:
                raise Broken(str(out.error))
            found.tokens = out.generated_tokens
            found.began = found.began or time.monotonic()
            if out.is_finished() or self._has_stopped(found):
                done.append(Made(found.wanted.key, tuple(found.tokens)))
                del self._open[name]
                if not out.is_finished():
                    self._manager.cancel_request(name)
        done += self._late()
        if not done:
            self._check()
        return done

    def give_up(self) -> list[WantedAnswer]:
        """Ends the manager, and returns what has no answer."""
        left = [o.wanted for o in self._open.values()]
        self._open.clear()
        self.close()
        return left

    @property
    def can_pause(self) -> bool:
        """Whether the model may be used while answers are open."""
        return not self._open or hasattr(self._manager, "pause")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the model is the caller's, and attends as it did before: the manager may have given it another
        implementation."""
        now = self._model.config._attn_implementation
        with self._nothing_runs():
            if now != self._attention:
                self._model.set_attn_implementation(self._attention)
            try:
                yield
            finally:
                if now != self._attention and self.own_flash:
                    flash.use(self._model)
                elif now != self._attention:
                    self._model.set_attn_implementation(now)

    @contextlib.contextmanager
    def _nothing_runs(self) -> Iterator[None]:
        """Inside, the manager's thread makes no step, not even of what was cancelled: two threads in one model get wrong numbers."""
        if self._manager is None or not self._manager.is_running():
            yield
        elif hasattr(self._manager, "pause"):
            with self._manager.pause():
                yield
        else:
            until = time.monotonic() + STALL_S
            while not self._idle():
                if time.monotonic() > until:
                    raise Broken(f"it did not stop within {STALL_S:.0f} s")
                time.sleep(0.002)
            yield

    def _idle(self) -> bool:
        manager = self._manager
        queued = not (manager.input_queue.empty() and manager.cancel_queue.empty())
        work = manager.batch_processor is not None and manager.batch_processor.has_pending_requests()
        return not (queued or work)

    def close(self) -> None:
        """Ends the manager's thread and frees its memory."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        with contextlib.suppress(Exception):
            _stop(manager)
        if self._model.config._attn_implementation != self._attention:
            self._model.set_attn_implementation(self._attention)

    # ---- inside

    def _start(self) -> None:
        try:
            import torch
            from transformers.generation.configuration_utils import ContinuousBatchingConfig

            # Its thread writes into what is made here, which no inference tensor allows.
            with torch.inference_mode(False), torch.no_grad():
                if self.own_flash:
                    flash.use(self._model)
                settings = self._settings_for(ContinuousBatchingConfig)
                made = self._model.init_continuous_batching(
                    generation_config=self._settings, continuous_batching_config=settings
                )
                if self.own_flash and flash.has_pages():
                    # transformers turns the table of pages off where it finds no package that reads one.
                    page = flash.PAGE if self._model.device.type == "cuda" else PAGE
                    pages = -(-min(self._longest, LONGEST_BY_PAGES) // page) + 1
                    made.continuous_batching_config.max_blocks_per_request = pages
                if hasattr(made, "warmup"):
                    made.warmup()
            made.start()
        except Exception as e:  # whatever a version, a kernel or a card makes of it: there is another way
            if self._model.config._attn_implementation != self._attention:
                self._model.set_attn_implementation(self._attention)
            raise Broken(f"{type(e).__name__}: {e}") from e
        self._manager = made

    def _settings_for(self, kind: Any) -> Any:
        model = self._model
        if model.device.type != "cuda":
            return _settings_on_cpu(model, kind)
        more: dict[str, Any] = {
            "seed": 0,
            "max_memory_percent": GPU_SHARE,
            "max_requests_per_batch": self._at_once,
        }
        if self.own_flash:
            # Graphs for steps of one token each alone: prompts come in so many sizes that each would need one of its own.
            graphs = flash.has_pages()
            more |= {"page_size": flash.PAGE, "use_cuda_graph": (False, graphs), "use_async_batching": graphs}
        return kind(**_known(kind, more))

    def _has_stopped(self, o: _Open) -> bool:
        fresh = len(o.tokens) - o.seen
        o.seen = len(o.tokens)
        for stop in o.wanted.stops:
            tail = self._decode(o.tokens[-(self._tail_of(stop) + fresh) :])
            if stop in tail and stop in self._decode(o.tokens):
                return True
        return False

    def _late(self) -> list[Made]:
        now, late = time.monotonic(), []
        for name, o in list(self._open.items()):
            if o.wanted.seconds and o.began and now - o.began > o.wanted.seconds:
                late.append(Made(o.wanted.key, tuple(o.tokens), late=True))
                del self._open[name]
                self._manager.cancel_request(name)
        return late

    def _check(self) -> None:
        """Raises Broken if nothing will come any more."""
        if not self._open:
            return
        if not self._manager.is_running():
            raise Broken("its thread has ended")
        if self.steps != self._step:
            self._step, self._stepped = self.steps, time.monotonic()
        elif time.monotonic() - self._stepped > STALL_S:
            raise Broken(f"no step for {STALL_S:.0f} s")


def check(model: Any, settings: Any) -> None:
    """Raises Broken where a model cannot, or where its own settings need what continuous batching leaves out."""
    if not hasattr(model, "init_continuous_batching"):
        raise Broken("this version of transformers has none")
    if getattr(model.config, "is_encoder_decoder", False):
        raise Broken("an encoder-decoder model")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise Broken("its layers are spread over several devices")
    known = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper") if settings.do_sample else ()
    names = ", ".join(
        n for p in model._get_logits_processor(settings) if (n := type(p).__name__) not in known
    )
    if names:
        # A penalty of the model's own settings, which would be dropped.
        raise Broken(f"the model's generation settings ask for {names}")


def _settings_on_cpu(model: Any, kind: Any) -> Any:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    a_token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    longest = getattr(config, "max_position_embeddings", 2048)
    pages = max(2 * longest // PAGE, min(CPU_BYTES // (a_token * PAGE), 4096))
    return kind(**_known(kind, {"page_size": PAGE, "num_blocks": int(pages), "max_batch_tokens": 1024}))


def _known(kind: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Under the names that this version has for them."""
    fields = kind.__dataclass_fields__
    if "page_size" in settings and "page_size" not in fields:
        settings = {**settings, "block_size": settings["page_size"]}
    return {k: v for k, v in settings.items() if k in fields}


def _stop(manager: Any) -> None:
    try:
        manager.stop(block=True, timeout=10, hard_stop=True)
    except TypeError:  # before there was a hard stop
        manager.stop(block=True, timeout=10)
    if hasattr(manager, "destroy"):
        manager.destroy()
