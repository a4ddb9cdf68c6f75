"""Tokens that requests whose prompts and decodes are placed apart have been given at each replica.

Source: splitwise-sim, pending tokens and memory of its instances (`MixedPoolScheduler`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from vajra_py.contract import ReplicaId, RequestView


@dataclass(eq=False, slots=True)
class Placement:
    """Replicas of a request's prompt and of its decodes, and its counted load there."""

    prompt_at: ReplicaId
    token_at: ReplicaId
    num_prompt_tokens: int
    most_tokens: int
    is_pending: bool = True
    """True until its prompt is computed."""
    has_left: bool = False
    """True once its KV is no longer where the prompt was computed."""


@dataclass(slots=True)
class Scheduled:
    """Tokens that requests have been given at one replica."""

    pending: int = 0
    """Prompts that are not computed, and one for each request that is to decode there."""
    memory: int = 0
    """Tokens whose KV it holds or is to hold."""
    here: dict[RequestView, None] = field(default_factory=dict)
    """Requests that wait or run there."""


class ScheduledTokens:
    """Placements of the requests that have not ended, and their sum at each replica."""

    def __init__(self) -> None:
        self.placed: dict[RequestView, Placement] = {}
        self.at: defaultdict[ReplicaId, Scheduled] = defaultdict(Scheduled)

    def place(self, request: RequestView, placement: Placement) -> None:
        """Count a request, which waits where its prompt is to be computed."""
        self.placed[request] = placement
        self.at[placement.prompt_at].here[request] = None
        self._count(placement, 1)

    def change(self, request: RequestView, **changes: Any) -> None:
        """Change fields of a request's placement."""
        placed = self.placed[request]
        self._count(placed, -1)
        for name, value in changes.items():
            setattr(placed, name, value)
        self._count(placed, 1)

    def forget(self, request: RequestView) -> Placement | None:
        """Count a request no more; returns its placement, None if it had none."""
        placed = self.placed.pop(request, None)
        if placed is not None:
            self._count(placed, -1)
            for replica_id in (placed.prompt_at, placed.token_at):
                self.at[replica_id].here.pop(request, None)
        return placed

    def _count(self, placed: Placement, sign: int) -> None:
        """Add a request's load at its replicas, or remove it (-1)."""
        at_prompt, at_tokens = self.at[placed.prompt_at], self.at[placed.token_at]
        at_tokens.pending += sign
        at_tokens.memory += sign * placed.most_tokens
        if placed.is_pending:
            at_prompt.pending += sign * placed.num_prompt_tokens
        if at_prompt is not at_tokens and not placed.has_left:
            at_prompt.memory += sign * (placed.num_prompt_tokens + 1)
