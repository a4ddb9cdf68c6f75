"""Forward pass: the logits of a step's rows.

Invariants:
    - A step is a flattened batch of T rows, one per token, with explicit positions, without padding or a Cache object.
    - Logits are computed for the requested rows only.
"""

from __future__ import annotations

from typing import Protocol

import torch

from vajra_py.engine.compute.model.attention import LayerFacts, PagedStep, Probe, under_way
from vajra_py.engine.compute.model.kv_groups import Metadata
from vajra_py.errors import ConfigError, Problem

Caches = list[tuple[torch.Tensor, torch.Tensor]]


class Forward(Protocol):
    """A model's forward pass over paged KV."""

    name: str
    has_head: bool
    """True if the pass returns logits; False if it returns an empty tensor [0, vocab], as in all but the last stage."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        metadata: Metadata,
        caches: Caches,
    ) -> torch.Tensor:
        """Return logits [R, vocab] at `rows` int64 [R], for token_ids and positions int64 [T]."""


class TransformersForward:
    """Forward pass of transformers' own modules, in which paged attention replaces transformers' attention."""

    name = "transformers"
    has_head = True

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        metadata: Metadata,
        caches: Caches,
    ) -> torch.Tensor:
        """See `Forward`."""
        with under_way(PagedStep(metadata, caches)):
            out = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                # Without a mask, some models search for padding and packed sequences, and thus wait for the device.
                attention_mask=torch.ones_like(token_ids)[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        logits: torch.Tensor = out.logits[0]
        return logits


@torch.inference_mode()
def probe_layers(model: torch.nn.Module, where: str) -> list[LayerFacts]:
    """Return the facts of each attention layer, found by a tiny forward pass without attention.

    Raises:
        ConfigError: the model does not use transformers' attention interface, or needs a feature that paged attention
            does not support.
    """
    probe = Probe({})
    device = next(model.parameters()).device
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    problem: str | None
    try:
        with under_way(probe):
            model(input_ids=tokens, position_ids=torch.arange(2, device=device)[None], use_cache=False)
        problem = probe.problem
    # The probe replaces attention by zeros, and the model's own code may then raise any exception.
    except Exception as error:
        problem = probe.problem or f"its forward pass failed with {type(error).__name__}: {error}"
    if problem is None and not probe.layers:
        problem = "its attention does not go through transformers' attention interface"
    if problem is None and sorted(probe.layers) != list(range(len(probe.layers))):
        problem = f"only some of its layers attend (layers {sorted(probe.layers)}): it keeps other state than K and V"
    if problem is not None:
        raise unsupported(where, model, problem)
    return [probe.layers[index] for index in range(len(probe.layers))]


def unsupported(where: str, model: torch.nn.Module, reason: str) -> ConfigError:
    """Return the error for a model that cannot be run for `reason`."""
    model_type = getattr(model.config, "model_type", type(model).__name__)
    return ConfigError(
        Problem(
            where,
            f"this engine cannot run the architecture ({model_type}): {reason}",
            "docs/reference/models.md lists the types that pass",
        )
    )
