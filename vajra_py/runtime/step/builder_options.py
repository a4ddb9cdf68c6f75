"""Options of plan building, and the messages for illegal requests of a policy."""

from __future__ import annotations

from dataclasses import dataclass

from vajra_py.runtime.requests.request import Request


class IllegalPlan(ValueError):
    """An illegal call of the builder by a policy; names the request."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request_id = request.request_id


@dataclass(slots=True, kw_only=True)
class BuilderOptions:
    """Options of plan building, from the replica's configuration and from the executing side."""

    reserve_prompt: bool
    watermark_blocks: int
    cache_at_schedule: bool
    keep_notes: bool = False
    """True if somebody reads the notes of policies; the replica sets it when it is observed."""
    reserves_growth: bool = False
    """True if decodes that grow together reserve blocks as a number first, where nobody reads block tables at each step."""
    holds_ended_slots: bool = False
    """True if a request that ends keeps slot and blocks for one more step, scheduled before the end was known."""
    busy_group_tokens: int = 500
