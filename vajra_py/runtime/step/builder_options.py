"""Options of plan building, and the messages for illegal requests of a policy."""

from __future__ import annotations

from msgspec import Struct

from vajra_py.contract import BatchFeatures
from vajra_py.runtime.requests.request import Request


class IllegalPlan(ValueError):
    """An illegal call of the builder by a policy; names the request."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request_id = request.request_id


class DraftRules(Struct, frozen=True, kw_only=True):
    """Rules of drafts (speculative decoding), from `replica.draft`."""

    num_tokens: int
    """Number of drafts of a decode in a step, unless the policy sets a number."""
    max_tokens: int
    """Largest number of drafts that a policy may set."""
    lookahead_tokens: int = 0
    """Tokens behind the drafts for which blocks are taken too."""
    keeps_blocks: bool = False
    """True if blocks of rejected drafts stay with their request, which uses them next; False: they are freed
    immediately.
    """
    past_max_tokens: bool = False
    """True if drafts are made for tokens beyond the request's `max_tokens`, within the model's length."""
    publishes_late: bool = False
    """True if accepted drafts enter the prefix cache only with their request's next step, if blocks are cached when
    steps are formed.
    """
    pads_admitted: bool = False
    """True if a request admitted with one token left is padded with draft positions, which are rejected, so that decode
    steps are uniform.
    """
    step_s: float = 0.0
    token_s: float = 0.0
    """Seconds that drafting adds to each step with drafts, and for each draft in it."""

    def time_s(self, features: BatchFeatures) -> float:
        """Return the seconds that drafting adds to a step."""
        num_tokens = features.num_draft_tokens
        return self.step_s + num_tokens * self.token_s if num_tokens else 0.0


class BuilderOptions(Struct, kw_only=True):
    """Options of plan building, from the replica's configuration and from the executing side."""

    reserve_prompt: bool
    watermark_blocks: int
    cache_at_schedule: bool
    keep_notes: bool = False
    """True if notes of policies are kept; set by the replica when it is observed."""
    reserves_growth: bool = False
    """True if decodes that grow together first reserve a number of blocks; for backends that do not read block tables
    at each step.
    """
    holds_ended_slots: bool = False
    """True if an ended request keeps slot and blocks for one more step, which was scheduled before the end was known.
    """
    busy_group_tokens: int = 500
    drafts: DraftRules | None = None
    """Rules of drafts; None: decodes have none."""
