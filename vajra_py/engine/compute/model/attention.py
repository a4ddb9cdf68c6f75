"""Paged attention for transformers' models, and the attention parameters of their layers.

The function registered in transformers' attention interface reads the current step from a context variable, not from
its arguments: some decoder layers drop unknown keyword arguments on the way to attention.

Invariants:
    - The current step belongs to the thread that computes it and is not visible to models in other threads.
    - A step's keys and values are written before its queries attend, layer by layer.
    - A layer's parameters (scale, window, soft cap, sinks) are taken from the interface's arguments, at every call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from vajra_py.engine.compute.model.kv_groups import Metadata, Scores, write_and_attend, write_and_attend_with_lse

PLAIN = "vajra_paged"
"""Name of the attention that takes windows as arguments and gets no mask from transformers."""
MASKED = "vajra_paged_windows"
"""Name of the attention for models that specify the window in the mask only."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Head counts, head widths, scale, window and soft cap of one attention layer."""

    layer_index: int
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool

    @property
    def kv_elements(self) -> int:
        """Number of elements of K and V that one token stores in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """Stand-in for transformers' attention mask; it states only the window."""

    window: int | None
    shape: tuple[int, ...] = (1, 1, 1, 1)


@dataclass(slots=True)
class PagedStep:
    """The current step: its batch, and each layer's (K cache, V cache) [num_blocks, block_size, Hkv, D]."""

    metadata: Metadata
    caches: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class Probe:
    """Stand-in for a step; it collects the layers' attention parameters."""

    layers: dict[int, LayerFacts]
    problem: str | None = None


_CURRENT: ContextVar[PagedStep | Probe | None] = ContextVar("vajra_paged_step", default=None)


@contextmanager
def under_way(step: PagedStep | Probe) -> Iterator[None]:
    """Return a context in which `step` is the current step of this thread's models."""
    token = _CURRENT.set(step)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def register() -> None:
    """Register the attentions `PLAIN` and `MASKED` with transformers. May be called again."""
    for name in (PLAIN, MASKED):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(MASKED, _mask)


def _mask(*_: Any, local_size: int | None = None, **__: Any) -> MaskSpec:
    return MaskSpec(local_size)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | MaskSpec | None = None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """Write key and value [1, Hkv, T, D] into the paged KV; return attention [1, T, Hq, Dv] of query [1, Hq, T, D]."""
    window = asked.get("sliding_window")
    if window is None and isinstance(attention_mask, MaskSpec):
        window = attention_mask.window
    scale, softcap, sinks = asked.get("scaling"), asked.get("softcap"), asked.get("s_aux")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    step = _CURRENT.get()
    if isinstance(step, Probe):
        index = getattr(module, "layer_idx", None)
        facts = LayerFacts(
            layer_index=-1 if index is None else index,
            num_query_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=float(scale),
            window=window,
            softcap=softcap,
            has_sinks=sinks is not None,
        )
        return _record(step, facts, asked, query)
    if step is None:
        raise RuntimeError("paged attention was called outside a step")
    cache = step.caches[int(module.layer_idx)]  # type: ignore[arg-type]
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    scores = Scores(scale, window, softcap)
    if sinks is None:
        return write_and_attend(rows, cache, step.metadata, scores)[None], None
    out, lse = write_and_attend_with_lse(rows, cache, step.metadata, scores)
    # A sink is a score without a value: the softmax's denominator is exp(lse) + exp(sink) instead of exp(lse). So the
    # output is multiplied by exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
    return (out * torch.sigmoid(lse - sinks.float()).unsqueeze(-1).to(out.dtype))[None], None


def _record(probe: Probe, facts: LayerFacts, asked: dict[str, Any], query: torch.Tensor) -> tuple[torch.Tensor, None]:
    if facts.layer_index in probe.layers or facts.layer_index < 0:
        probe.problem = "its layers are not numbered one by one (some share keys and values, or carry no number)"
    if asked.get("position_bias") is not None:
        probe.problem = "its attention adds a bias to the scores"
    if asked.get("is_causal") is False:
        probe.problem = "its attention is not causal"
    probe.layers[facts.layer_index] = facts
    return query.new_zeros((1, query.shape[2], query.shape[1], facts.value_dim)), None
