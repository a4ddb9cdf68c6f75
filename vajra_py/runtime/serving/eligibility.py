"""Replicas of a replicaset that can run a request (its eligible replicas), and bounds on requests over all replicas.

Replicas may differ in limits, latency model and replica scheduler. If all are equal, only one is checked; if they
differ, the replicaset's policies see only the eligible ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from vajra_py.contract import PoolRole, ReplicaLimits, ReplicaLoadView
from vajra_py.errors import POLICY_EXCEPTIONS, ConfigError, PolicyError, Problem, place_of_definition
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.replica import Replica


class AdmissionLimits(Struct, frozen=True):
    """Limits on the waiting requests of a replicaset; None: no limit."""

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


class Holders:
    """Replicas that can hold a request, in order of their ids.

    Attributes:
        all: all of these replicas.
        of_prompts: the replicas that may compute prompts.
        of_decodes: the replicas that may decode, and can therefore continue a request whose prompt another replica
            computed.
        can_serve: True if some replicas may compute prompts and some may decode.
    """

    __slots__ = ("all", "can_serve", "of_decodes", "of_prompts")

    def __init__(self, kinds: Iterable[Sequence[Replica]]) -> None:
        self.all = tuple(sorted((one for kind in kinds for one in kind), key=lambda one: one.replica_id))
        self.of_prompts = tuple(one for one in self.all if one.parts.role is not PoolRole.DECODE)
        self.of_decodes = tuple(one for one in self.all if one.parts.role is not PoolRole.PREFILL)
        self.can_serve = bool(self.of_prompts and self.of_decodes)


_NOBODY = Holders(())


class Serving:
    """Replicas that can hold a request and take requests; valid until the state of a replica changes.

    Attributes:
        all: replicas that are up, and those that take requests again once a scaler has started them.
        can_serve: True if some replicas in `all` may compute prompts and some may decode.
        of_decodes: replicas that are up and may decode.
    """

    __slots__ = ("all", "can_serve", "of_decodes")

    def __init__(self, holders: Holders, may_serve: Callable[[int], bool], is_up: Callable[[int], bool]) -> None:
        self.all = tuple(one for one in holders.all if may_serve(one.replica_id))
        self.can_serve = have_both_roles(self.all)
        self.of_decodes = tuple(one for one in holders.of_decodes if is_up(one.replica_id))


def have_both_roles(replicas: Iterable[Replica]) -> bool:
    """Return True if some of these replicas compute prompts and some decode."""
    roles = {one.parts.role for one in replicas}
    return PoolRole.MIXED in roles or len(roles) > 1


class RequestBounds:
    """Bounds on requests over all replicas of a replicaset, whatever the states of these replicas.

    Attributes:
        block_size: number of tokens per KV block, equal on all replicas, so that a request's block hashes are computed
            once.
        max_model_len: the largest `max_model_len` of all replicas that may decode; an explicit `max_tokens` is reduced
            if prompt and output would exceed it.
        max_request_tokens: maximum number of prompt and output tokens together that a request may have on any replica
            that may decode.
        largest: limits of a replica that has room for `max_request_tokens`.
        are_equal: True if all replicas can hold the same requests (`kinds_of`).
    """

    def __init__(self, replicaset: str, replicas: Sequence[Replica]) -> None:
        """Compute the bounds. Raises `ConfigError` if replicas have different block sizes."""
        sizes = {one.limits.block_size for one in replicas}
        if len(sizes) > 1:
            message = f"replicas of one replicaset have blocks of one size (got {sorted(sizes)} tokens)"
            raise ConfigError(Problem(f"replicasets.{replicaset}", message, "Another replicaset for other block sizes"))
        self.block_size = sizes.pop()
        self._kinds = kinds_of(replicas)
        self.are_equal = len(self._kinds) == 1
        ending = [kind[0] for kind in self._kinds if kind[0].parts.role is not PoolRole.PREFILL]
        ending = ending or [kind[0] for kind in self._kinds]  # without a replica that may decode, all count
        largest = max(ending, key=lambda one: one.max_request_tokens)
        self.largest = largest.limits
        self.max_request_tokens = largest.max_request_tokens
        self.max_model_len = max(one.limits.max_model_len for one in ending)
        self._one, self._everybody = replicas[0], Holders(self._kinds)
        self._holders: dict[tuple[bool, ...], Holders] = {}
        self._sure_tokens = min(one.max_request_tokens for one in replicas)
        """Maximum number of prompt and output tokens together for which every replica has room."""
        self._request_tokens = sorted({one.max_request_tokens for one in ending})
        self.is_split = any(one.parts.role is not PoolRole.MIXED for one in replicas)
        """True if some replicas compute only prompts, or only decodes."""

    def output_limit(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the maximum number of tokens that a request may generate; it is below 1 if no replica has room for the
        prompt and one token.

        An explicit `max_tokens` is reduced only to `max_model_len`; whether KV memory has room is checked by `holders`.
        Without `max_tokens`, the limit is that of the smallest replica with room for the prompt. The request can then
        run on every replica with room for the prompt.
        """
        if max_tokens is not None:
            return min(max_tokens, self.max_model_len - num_prompt_tokens)
        if self.are_equal:
            return self.max_request_tokens - num_prompt_tokens
        sizes = self._request_tokens
        smallest = bisect_right(sizes, num_prompt_tokens)
        return (sizes[smallest] if smallest < len(sizes) else self.max_request_tokens) - num_prompt_tokens

    def holders(self, request: Request) -> Holders:
        """Return the replicas that can hold the request at its maximum length; equal results are the same object."""
        if request.num_prompt_tokens + request.max_tokens <= self._sure_tokens:
            return self._everybody
        if self.are_equal:
            return self._everybody if self._one.can_hold(request) else _NOBODY
        fitting = tuple([kind[0].can_hold(request) for kind in self._kinds])
        found = self._holders.get(fitting)
        if found is None:
            kinds = [kind for kind, fits in zip(self._kinds, fitting, strict=True) if fits]
            found = self._holders[fitting] = Holders(kinds)
        return found

    def why_nobody(self, request: Request) -> str:
        """Return the reason why the replicas cannot serve a request."""
        prompt, output = request.num_prompt_tokens, request.max_tokens
        whole = f"prompt and output ({prompt} + {output} tokens)"
        where = f"blocks of {self.block_size} tokens)"
        if not self.holders(request).of_decodes:
            return f"{whole} can never fit into the KV memory of a replica ({self.largest.num_blocks} {where}"
        limits = [kind[0].limits for kind in self._kinds if kind[0].parts.role is not PoolRole.DECODE]
        longest = max(one.max_model_len for one in limits)
        if prompt + output > longest:
            return f"{whole} are more than a replica that computes prompts takes (max_model_len: {longest})"
        num_blocks = max(one.num_blocks for one in limits)
        which = "of a replica that computes prompts"
        return f"the prompt ({prompt} tokens) can never fit into the KV memory {which} ({num_blocks} {where}"


def kinds_of(replicas: Sequence[Replica]) -> list[list[Replica]]:
    """Return replicas grouped by limits, role and adapters; replicas of a group can hold the same requests."""
    kinds: dict[tuple[ReplicaLimits, PoolRole, frozenset[str] | None], list[Replica]] = {}
    for one in replicas:
        names = None if one.adapters is None else one.adapters.names
        kinds.setdefault((one.limits, one.parts.role, names), []).append(one)
    return list(kinds.values())


def first_refusal(
    replicas: Iterable[Replica], load_of: Callable[[int], ReplicaLoadView], request: Request, now: float
) -> str | None:
    """Return the first refusal ("policy: reason") if every replica's scheduler refuses the request, else None."""
    first: str | None = None
    for replica in replicas:
        parts = replica.parts
        reason = refusal_of(parts.policy, parts.policy_name, load_of(replica.replica_id), request, now)
        if reason is None:
            return None
        first = first or f"{parts.policy_name}: {reason}"
    return first


def refusal_of(scheduler: Any, name: str, replica: ReplicaLoadView, request: Request, now: float) -> str | None:
    """Return a replica scheduler's reason for never running the request on its replica; None if it has none."""
    refuses: Callable[[Request, ReplicaLoadView, float], object] | None = getattr(scheduler, "refuses", None)
    if refuses is None:
        return None
    try:
        reason = refuses(request, replica, now)
    except POLICY_EXCEPTIONS as error:
        raise PolicyError.caused_by(name, error, request_id=request.request_id) from error
    if reason is None or isinstance(reason, str):
        return reason
    message = f"refuses() is neither a reason nor None (got {reason!r}). Allowed: a text, or None"
    raise PolicyError(name, message, request_id=request.request_id, place=place_of_definition(refuses))
