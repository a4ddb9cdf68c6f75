"""Options of plan building, and the messages for illegal requests of a policy."""

from __future__ import annotations

from vajra_py.runtime.requests.request import Request


class IllegalPlan(ValueError):
    """A policy asked for something that makes no sense; names the request."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request_id = request.request_id


class BuilderOptions:
    """What the replica's configuration says about building plans."""

    __slots__ = (
        "busy_group_tokens",
        "cache_at_schedule",
        "holds_ended_slots",
        "keep_notes",
        "reserve_prompt",
        "reserves_growth",
        "watermark_blocks",
    )

    def __init__(
        self,
        *,
        reserve_prompt: bool,
        watermark_blocks: int,
        cache_at_schedule: bool,
        keep_notes: bool = False,
        reserves_growth: bool = False,
        busy_group_tokens: int = 500,
    ) -> None:
        self.reserve_prompt = reserve_prompt
        self.watermark_blocks = watermark_blocks
        self.cache_at_schedule = cache_at_schedule
        self.keep_notes = keep_notes
        self.reserves_growth = reserves_growth
        """Whether decodes that grow together get their blocks as a number first: where nobody reads tables step by step."""
        self.holds_ended_slots = False
        """Whether a request that ends with a step keeps slot and blocks for the next one, which was scheduled before the end was known."""
        self.busy_group_tokens = busy_group_tokens
