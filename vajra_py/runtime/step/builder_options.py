"""Options of plan building, and the messages for illegal requests of a policy."""

from __future__ import annotations

from dataclasses import dataclass

from vajra_py.runtime.requests.request import Request


class IllegalPlan(ValueError):
    """A policy asked for something that makes no sense; names the request."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request_id = request.request_id


@dataclass(slots=True, kw_only=True)
class BuilderOptions:
    """What the replica's configuration and whoever executes its steps say about building plans."""

    reserve_prompt: bool
    watermark_blocks: int
    cache_at_schedule: bool
    keep_notes: bool = False
    """Whether somebody looks at the notes of policies; the replica says so when it is watched."""
    reserves_growth: bool = False
    """Whether decodes that grow together get their blocks as a number first: where nobody reads tables step by step."""
    holds_ended_slots: bool = False
    """Whether a request that ends with a step keeps slot and blocks for the next one, which was scheduled before the end was known."""
    busy_group_tokens: int = 500
