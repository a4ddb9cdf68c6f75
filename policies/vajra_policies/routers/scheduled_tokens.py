"""Tokens scheduled at each replica, for requests whose prompts and decodes are placed separately.

Source: splitwise-sim, pending tokens and memory of its instances (`MixedPoolScheduler`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from vajra_py.contract import ReplicaId, RequestView


@dataclass(eq=False, slots=True)
class Placement:
    """Replicas of a request's prompt and of its decodes, and the facts that determine the load counted at these
    replicas.
    """

    prompt_at: ReplicaId
    token_at: ReplicaId
    num_prompt_tokens: int
    most_tokens: int
    is_pending: bool = True
    """True until the prompt is computed."""
    has_left: bool = False
    """True once the KV has left the replica that computed the prompt."""


@dataclass(slots=True)
class Scheduled:
    """Tokens scheduled at one replica."""

    pending: int = 0
    """Number of prompt tokens that the replica has to compute, plus 1 for each request whose decodes are placed there.
    """
    memory: int = 0
    """Number of tokens whose KV the replica holds or will hold."""
    here: dict[RequestView, None] = field(default_factory=dict)
    """Requests that wait or run at the replica."""


class ScheduledTokens:
    """Placements of live requests, and the sum of their loads at each replica."""

    def __init__(self) -> None:
        self.placed: dict[RequestView, Placement] = {}
        self.at: defaultdict[ReplicaId, Scheduled] = defaultdict(Scheduled)

    def place(self, request: RequestView, placement: Placement) -> None:
        """Count a request, which waits at the replica that will compute its prompt."""
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
        """Stop counting a request, and return its placement; None if it had none."""
        placed = self.placed.pop(request, None)
        if placed is not None:
            self._count(placed, -1)
            for replica_id in (placed.prompt_at, placed.token_at):
                self.at[replica_id].here.pop(request, None)
        return placed

    def _count(self, placed: Placement, sign: int) -> None:
        """Add a request's load at its replicas (`sign` 1), or remove it (`sign` -1)."""
        at_prompt, at_tokens = self.at[placed.prompt_at], self.at[placed.token_at]
        at_tokens.pending += sign
        at_tokens.memory += sign * placed.most_tokens
        if placed.is_pending:
            at_prompt.pending += sign * placed.num_prompt_tokens
        if at_prompt is not at_tokens and not placed.has_left:
            at_prompt.memory += sign * (placed.num_prompt_tokens + 1)
