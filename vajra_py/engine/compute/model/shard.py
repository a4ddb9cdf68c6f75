"""Tensor parallelism: each rank's share of a layer, and how the shares are combined.

Heads and the MLP's inner width are divided. Each rank's attention and MLP compute a summand of the sum that is added to
the residual (Megatron-LM, Shoeybi et al. 2019). Every rank holds the residual, the norms and the embedding.

Invariants:
    - With a single rank, nothing is divided or exchanged.
    - Where logits are computed, all tensor-parallel ranks have the same logits, and so sample the same tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from vajra_py.engine.compute.model.attention import LayerFacts
from vajra_py.engine.compute.model.fused_parts import Norm, Product


class Shard:
    """Share of rank `rank` among `size` tensor-parallel ranks."""

    __slots__ = ("_group", "rank", "size")

    def __init__(self, rank: int = 0, size: int = 1, group: distributed.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def layer(self, facts: LayerFacts) -> LayerFacts:
        """Return a layer's facts for one rank, which has a share of the heads."""
        return replace(
            facts,
            num_query_heads=facts.num_query_heads // self.size,
            num_kv_heads=facts.num_kv_heads // self.size,
        )

    def problem(self, layers: list[LayerFacts], inner: int) -> str | None:
        """Return why a model with these layers and this inner width of the MLP cannot be divided; None if it can."""
        for what, count in (("KV heads", min(one.num_kv_heads for one in layers)), ("inner width", inner)):
            if count % self.size:
                return f"{what} ({count}) cannot be divided among {self.size} ranks"
        return None

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the first dimension: outputs of a linear layer."""
        return weight.chunk(self.size)[self.rank] if self.size > 1 else weight

    def columns(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the second dimension: inputs of a linear layer."""
        return weight.chunk(self.size, 1)[self.rank] if self.size > 1 else weight

    def once(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the bias on rank 0, else None, so that a sum over ranks adds it once."""
        return bias if self.rank == 0 else None

    def vocabulary_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the output layer; the whole layer if it cannot be divided evenly."""
        return self.rows(weight) if weight.shape[0] % self.size == 0 else weight

    def experts(self, module: Any) -> Any:
        """Reduce every expert of a mixture to this rank's part of the expert's inner width, and return `module`."""
        if self.size > 1:
            experts = module.experts
            gate, up = experts.gate_up_proj.chunk(2, 1)
            inner = torch.cat((gate.chunk(self.size, 1)[self.rank], up.chunk(self.size, 1)[self.rank]), 1)
            experts.gate_up_proj = torch.nn.Parameter(inner.contiguous(), requires_grad=False)
            down = experts.down_proj.chunk(self.size, 2)[self.rank].contiguous()
            experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
        return module

    def add_product(
        self, hidden: torch.Tensor, x: torch.Tensor, product: Product, norm: Norm | None, following: Norm
    ) -> torch.Tensor:
        """Add norm(sum over ranks of product(x)) to `hidden` in place, and return `following(hidden)`.

        `norm` None: the sum itself is added.
        """
        if self.size > 1 or norm is not None or (following.is_fused and not product.adds_in_place):
            return self.add(hidden, product(x), norm, following)
        return following(product.add_to(hidden, x))

    def add(self, hidden: torch.Tensor, part: torch.Tensor, norm: Norm | None, following: Norm) -> torch.Tensor:
        """Add norm(sum over ranks of part) to `hidden` in place, and return `following(hidden)`.

        `norm` None: the sum itself is added.
        """
        if self.size > 1:
            distributed.all_reduce(part, group=self._group)
        return following.after_adding(hidden, part, norm)

    def gather_columns(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return logits [R, vocab], gathered from every rank's columns if they were divided."""
        if logits.shape[1] == vocab_size:
            return logits
        parts = [torch.empty_like(logits) for _ in range(self.size)]
        distributed.all_gather(parts, logits.contiguous(), group=self._group)
        return torch.cat(parts, -1)
