"""torch's own flash attention under transformers' continuous batching, where no package of flash attention is installed.

Without such a package transformers attends over the keys of the whole batch under a mask: on an H200 712 tokens a second of a
5.9 B model. torch brings the same kernel (`torch.nn.attention.varlen`); from 2.12 on it also reads keys through a table of pages. This
file is the adapter between the two, and a trial that decides whether it may be used: no kernel of our own. The calling
convention of continuous batching changed between transformers 5.17 and 5.24; both are served.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

from .fitting import log

NAME = "torch_flash"
"""Continuous batching builds no mask for an implementation with "flash" in its name."""
PAGE = 256
"""Tokens of a page: what the kernel takes."""
LARGEST_HEAD = 256
ERROR = 0.02
"""Of the trial: the norm of the difference to the plain computation over its norm; 16 bits alone do a third of that."""


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Any, None]:
    """Attention of one layer as transformers calls it: `query` [1, heads, tokens, width], tokens of all sequences in a row.

    Returns [1, tokens, heads, width]. Raises ValueError where the model asks for what torch's kernel does not do.
    """
    for name in ("softcap", "s_aux"):
        if more.get(name) is not None:
            raise ValueError(f"torch's flash attention has no {name}")
    window = sliding_window or getattr(module, "sliding_window", None)
    scale = scaling if scaling is not None else module.scaling
    q = query[0].transpose(0, 1).contiguous()
    starts = more["cu_seq_lens_q"].int()
    table, cache = more.get("block_table"), more.get("cache")
    if table is not None:
        # One new token of each sequence; the keys before it are found through the table of pages.
        keys, values, table, lengths = _pages_of(module, cache, table, more)
        return _decode(q, key, value, keys, values, table, lengths, starts, scale)[None], None
    ends = more["cu_seq_lens_k"]
    if cache is not None:  # until 5.23 the keys before these are the attention's own business
        k, v = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx,
                            read_index=more["read_index"], write_index=more["write_index"])  # fmt: skip
        kind = "sliding_attention" if window else "full_attention"
        ends = ends[kind] if isinstance(ends, dict) else ends
        longest_q, longest_k = more["max_seqlen_q"], more["max_seqlen_k"]
        longest_k = longest_k[kind] if isinstance(longest_k, dict) else longest_k
    else:
        k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
        longest_q, longest_k = more["max_length_q"], more["max_length_k"]
    found = varlen(q, k.contiguous(), v.contiguous(), starts, ends.int(), int(longest_q), int(longest_k), scale=scale,
                   window_size=((window - 1) if window else -1, 0), enable_gqa=True)  # fmt: skip
    return found[None], None


def varlen(*arrays: Any, **more: Any) -> Any:
    """torch's kernel; imported where it is used, since torch before 2.10 has none."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if (
        "enable_gqa" not in known
    ):  # until 2.11 nobody asks, and the kernel takes fewer heads of keys as they are
        more.pop("enable_gqa", None)
    return varlen_attn(*arrays, **more)


def has_pages() -> bool:
    """Whether torch's kernel reads keys through a table of pages: then a step of one token each is captured in a graph."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"block_table", "seqused_k"} <= set(inspect.signature(varlen_attn).parameters)


def use(model: Any) -> None:
    """The model attends in this way from now on, inside continuous batching only; its own setter of another implementation ends it."""
    from transformers import AttentionInterface

    # Until 5.23 an implementation for pages has a prefix.
    name = f"paged|{NAME}" if "paged|sdpa" in AttentionInterface() else NAME
    AttentionInterface.register(name, attend)
    # Its setter would look for a package of that name.
    model.config._attn_implementation = name


def reason_against(torch: Any, model: Any) -> str | None:
    """Why this model on this device cannot attend so; None if it can, tried with its own heads."""
    if model.device.type != "cuda" or model.dtype not in (torch.bfloat16, torch.float16):
        return "not 16 bits on a GPU"
    if any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface", "kernels")):
        return "transformers has a package of flash attention"
    if not getattr(model, "_supports_flash_attn", False):
        return "the model's code does not support flash attention"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no varlen_attn"
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if width > LARGEST_HEAD or width % 8 or getattr(config, "attn_logit_softcapping", None):
        return f"heads of {width}, or a soft cap"
    try:
        worst = trial(torch, model.device, model.dtype, config.num_attention_heads, heads, width, paged=has_pages())  # fmt: skip
    except Exception as e:  # noqa: BLE001  whatever a build or a card lacks: there is another way
        return f"{type(e).__name__}: {str(e)[:200]}"
    return None if worst <= ERROR else f"it differs from the plain computation by {worst:.2g}"


def trial(
    torch: Any, device: Any, dtype: Any, heads: int, kv_heads: int, width: int, *, paged: bool = True
) -> float:
    """The largest relative error of both uses of the kernel against attention written out in float32: sequences in a row, and
    one new token each behind pages that lie out of order."""
    lengths, scale = (5, 300, 257), width**-0.5
    make = torch.Generator(device="cpu").manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=make).to(device=device, dtype=dtype)

    def ints(values: Any) -> Any:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    rows = [(drawn(n, heads, width), drawn(n, kv_heads, width), drawn(n, kv_heads, width)) for n in lengths]
    wanted = [_plain(torch, *row, scale) for row in rows]
    q, k, v = (torch.cat([r[i] for r in rows]) for i in range(3))
    starts = ints([0, *(sum(lengths[: i + 1]) for i in range(len(lengths)))])
    found = varlen(q, k, v, starts, starts, max(lengths), max(lengths), scale=scale, window_size=(-1, 0), enable_gqa=True)  # fmt: skip
    worst = _error(found, torch.cat(wanted))
    if not paged:
        return worst
    pages = [drawn(6, PAGE, kv_heads, width) for _ in range(2)]
    table, at = ints([-1] * 2 * (len(lengths) + 1)).view(-1, 2), 5
    for i, (_, *kv) in enumerate(rows):
        for part in range(0, lengths[i] - 1, PAGE):
            n = min(PAGE, lengths[i] - 1 - part)
            for held, one in zip(pages, kv, strict=True):
                held[at, :n] = one[part : part + n]
            table[i, part // PAGE] = at
            at -= 1
        if lengths[i] - 1 == PAGE:  # the new token begins a page
            table[i, 1] = at
    last = [torch.stack([r[j][-1] for r in rows] + [rows[0][j][0]]) for j in range(3)]  # and a row of padding
    new_starts = ints([*range(len(lengths) + 1), len(lengths)])
    key, value = (x.transpose(0, 1)[None] for x in last[1:])
    seen = _decode(last[0], key, value, pages[0], pages[1], table, ints([*lengths, 0]), new_starts, scale)
    return max(worst, _error(seen[: len(lengths)], torch.stack([w[-1] for w in wanted])))


# ---- inside


def _pages_of(module: Any, cache: Any, table: Any, more: Any) -> tuple[Any, Any, Any, Any]:
    """(keys, values) [pages, tokens, heads, width], the table of pages [sequences, pages], tokens of each with the new one."""
    ends = more["cu_seq_lens_k"]
    lengths = (ends[1:] - ends[:-1]).int()
    if cache is None:
        return more["k_cache"], more["v_cache"], table, lengths
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    return cache.key_cache[layer].view(shape), cache.value_cache[layer].view(shape), table[group], lengths


def _decode(
    q: Any, key: Any, value: Any, keys: Any, values: Any, table: Any, lengths: Any, starts: Any, scale: float
) -> Any:
    """Writes the new key and value of each sequence behind its others, then attends. Only tensors: it is captured in graphs."""
    page = keys.shape[1]
    table = table[: len(lengths)].clamp(min=0)
    real = lengths > 0
    last = (lengths - 1).clamp(min=0)
    held = table.gather(1, (last // page).long()[:, None])[:, 0].long()
    slot = (last % page).long()
    # Padding repeats what the first sequence writes: there is always one, and nothing else is touched.
    held, slot = (x.where(real, x[:1]) for x in (held, slot))
    for pages, new in ((keys, key), (values, value)):
        rows = new[0].transpose(0, 1)
        pages[held, slot] = rows.where(real[:, None, None], rows[:1])
    return varlen(q, keys, values, starts, None, 1, table.shape[1] * page, scale=scale, window_size=(-1, 0),
                  enable_gqa=True, seqused_k=lengths, block_table=table)  # fmt: skip


def _plain(torch: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
    """[tokens, heads, width], causal, in float32."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def _error(found: Any, wanted: Any) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def say(reason: str | None) -> None:
    """Writes to the worker's log how texts are attended to."""
    log(
        "texts: torch's own flash attention"
        if reason is None
        else f"texts: attention as transformers chooses ({reason})"
    )
