"""Options of plan building, and the error for illegal calls by a policy."""

from __future__ import annotations

from msgspec import Struct

from vajra_py.contract import BatchFeatures
from vajra_py.runtime.requests.request import Request


class IllegalPlan(ValueError):
    """Illegal call of the builder by a policy, with the id of the request that it concerns."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request_id = request.request_id


class DraftRules(Struct, frozen=True, kw_only=True):
    """Rules of drafts (speculative decoding), from `replica.draft`."""

    num_tokens: int
    """Number of drafts of a decode per step, unless the policy sets another number."""
    max_tokens: int
    """Maximum number of drafts that a policy may set."""
    lookahead_tokens: int = 0
    """Number of tokens after the drafts for which blocks are allocated as well."""
    keeps_blocks: bool = False
    """True if a request keeps the blocks of its rejected drafts for its next tokens; False: these blocks are freed
    immediately.
    """
    past_max_tokens: bool = False
    """True if drafts are made for tokens beyond the request's `max_tokens`, within the model's length."""
    publishes_late: bool = False
    """True if blocks with accepted drafts are cached only when the request's next step is formed; applies only if
    blocks are cached when steps are formed.
    """
    pads_admitted: bool = False
    """True if a request admitted with one token left to compute is padded with draft positions, which are rejected, so
    that decode steps are uniform.
    """
    step_s: float = 0.0
    """Seconds that drafting adds to each step with drafts."""
    token_s: float = 0.0
    """Seconds that drafting adds for each draft in a step."""

    def time_s(self, features: BatchFeatures) -> float:
        """Return the seconds that drafting adds to a step."""
        num_tokens = features.num_draft_tokens
        return self.step_s + num_tokens * self.token_s if num_tokens else 0.0


class BuilderOptions(Struct, kw_only=True):
    """Options of plan building, from the replica's configuration and from the backend."""

    reserve_prompt: bool
    watermark_blocks: int
    cache_at_schedule: bool
    keep_notes: bool = False
    """True if policies' notes are kept; set by the replica according to its observers."""
    reserves_growth: bool = False
    """True if blocks for decodes that grow together are at first only reserved, and entered in block tables later. The
    backend must then not read block tables in each step.
    """
    holds_ended_slots: bool = False
    """True if an ended request keeps its slot and blocks for one more step, because that step is scheduled before the
    end is known.
    """
    busy_group_tokens: int = 500
    """A KV-parallel group that has at least this many query tokens in a step takes no new request in that step."""
    drafts: DraftRules | None = None
    """Rules of drafts; None: decodes have no drafts."""
