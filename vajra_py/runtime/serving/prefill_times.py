"""Prefill times of a replicaset, predicted from the chunks that its present replica schedulers form.

Replica schedulers are built first; then `follow` is called with a table for each kind of replica, and prioritizer and
replicaset scheduler are built. If replica schedulers are replaced, `follow` is called again on the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from msgspec import Struct

from vajra_py.contract import PrefillTime, ReplicaLimits, ReplicaScheduler
from vajra_py.contract.policies import ChunksSoloPrompts, SoloChunkSize
from vajra_py.errors import POLICY_EXCEPTIONS, ConfigError, PolicyError, Problem, VajraError, place_of_definition


class PrefillTable(Struct, frozen=True):
    """Prefill times on one kind of replica, and the maximum number of tokens of a request there."""

    max_request_tokens: int
    times: PrefillTime


class ReplicasetPrefillTime:
    """`PrefillTime` on the fastest kind of replica that has room for the prompt; if none has room, on the fastest kind."""

    __slots__ = ("tables",)

    def __init__(self) -> None:
        self.tables: Sequence[PrefillTable] = ()
        """One table for each kind of replica; empty until `follow` is called."""

    def follow(self, tables: Sequence[PrefillTable]) -> None:
        """Predict from these tables from now on."""
        self.tables = tables

    def total_s(self, num_prompt_tokens: int) -> float:
        """Return the time in seconds to compute a whole prompt."""
        tables = self.tables
        if len(tables) == 1:
            return tables[0].times.total_s(num_prompt_tokens)
        return min(one.times.total_s(num_prompt_tokens) for one in self._with_room(num_prompt_tokens))

    def remaining_s(self, num_prompt_tokens: int, num_done_tokens: int) -> float:
        """Return the time in seconds to compute the rest of a prompt."""
        tables = self.tables
        if len(tables) == 1:
            return tables[0].times.remaining_s(num_prompt_tokens, num_done_tokens)
        return min(
            one.times.remaining_s(num_prompt_tokens, num_done_tokens) for one in self._with_room(num_prompt_tokens)
        )

    def _with_room(self, num_prompt_tokens: int) -> Sequence[PrefillTable]:
        if not self.tables:
            message = "needs prefill times while it is built, but these depend on the replica schedulers, which are built later"
            raise ConfigError(Problem("replica_scheduler", message, "Allowed: asking when it is asked for a step"))
        return [one for one in self.tables if num_prompt_tokens < one.max_request_tokens] or self.tables


def solo_chunk_rule(scheduler: ReplicaScheduler, limits: ReplicaLimits, name: str | None = None) -> SoloChunkSize:
    """Return the rule for the next chunk of a prompt that is alone on a replica: the replica scheduler's own rule, else
    the step's token budget, else the whole prompt.

    The scheduler's own rule raises `PolicyError` for an exception or an invalid size, with `name` as the policy (None:
    the name of its class).
    """
    if isinstance(scheduler, ChunksSoloPrompts):
        return _checked_rule(scheduler.solo_chunk_size, name or type(scheduler).__name__)
    budget = limits.max_batch_tokens
    return lambda done, remaining: remaining if budget is None else min(remaining, budget)


def _checked_rule(solo_chunk_size: SoloChunkSize, policy: str) -> SoloChunkSize:
    def rule(num_done_tokens: int, num_remaining_tokens: int) -> int:
        try:
            size: object = solo_chunk_size(num_done_tokens, num_remaining_tokens)
        except VajraError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise PolicyError.caused_by(policy, error) from error
        if not isinstance(size, Integral) or int(size) < 1:
            message = (
                f"solo_chunk_size({num_done_tokens}, {num_remaining_tokens}): got {size!r}. "
                "Allowed: a whole number of at least 1"
            )
            raise PolicyError(policy, message, place=place_of_definition(solo_chunk_size))
        return int(size)

    return rule
