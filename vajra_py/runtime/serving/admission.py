"""Admission gate: calls the admission policy for arriving requests, and keeps the requests that the policy defers.

One gate serves all replicasets of a run. A deferred request is alive and in no queue: it may be aborted or expire, and
the policies of the three layers see it only after it is accepted. The admission policy is called again for a deferred
request at the time that the policy set, or, without a time, when a request ends or the policy is woken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import numpy as np
from msgspec import Struct, structs
from sortedcontainers import SortedKeyList

from vajra_py.contract import (
    Accept,
    AdmissionDecision,
    AdmissionPolicy,
    Defer,
    PoolView,
    Refuse,
    ReplicaLoadView,
)
from vajra_py.contract.latency import LAST_S
from vajra_py.errors import POLICY_EXCEPTIONS, PolicyError, VajraError, place_of_definition
from vajra_py.runtime.kv import BlockHashes
from vajra_py.runtime.requests.listeners import NOBODY, Listeners, listeners_among
from vajra_py.runtime.requests.rejections import SHED
from vajra_py.runtime.requests.request import Admission, Request, RequestFacts, RequestState
from vajra_py.runtime.serving.policy_swap import bind_all
from vajra_py.runtime.serving.pools import pool_loads
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.support.clock import to_seconds, to_ticks

MAX_FRUITLESS = 100_000
"""Maximum number of consecutive deferrals while every request that has not ended is deferred."""

MAX_DEFERRALS, DEFERRALS_S = 10_000, 0.1
"""Maximum number of deferrals of one request to a set time (`Defer.until`) within `DEFERRALS_S` seconds; more deferrals
count as an endless loop, because the mean time between them, 10 us, is shorter than any step.
"""

MakeHashes = Callable[[int], BlockHashes | None]
_COUNTED_TICKS = to_ticks(DEFERRALS_S)


class Deferral(Struct, eq=False):
    """One deferred request.

    Attributes:
        make_hashes: function of a block size that returns the hashes of the prompt's blocks.
        until: tick at which the policy is called again; None: it is called when a request ends or the policy is woken.
        counted_from: tick from which the request's deferrals to a set time are counted.
        num_counted: number of these deferrals.
        holds_rest: True if all later deferred requests of the replicaset, in the order of priority and then of
            submission, wait as long as this request does (see `Defer`). Without effect if `until` is set.
        is_void: True if the policy was called again, or the request has ended.
    """

    request: Request
    facts: RequestFacts
    make_hashes: MakeHashes
    until: int | None = None
    counted_from: int = 0
    num_counted: int = 0
    holds_rest: bool = False
    is_void: bool = False

    def _is_counted(self, now: int) -> bool:
        return now <= self.counted_from + _COUNTED_TICKS and self.num_counted > 0

    def is_last(self, now: int) -> bool:
        """Return True if another deferral to a set time would exceed `MAX_DEFERRALS`."""
        return self.num_counted >= MAX_DEFERRALS and self._is_counted(now)

    def following(self, until: int | None, holds_rest: bool, now: int) -> Deferral:
        """Return the request's next deferral, which begins at tick `now`."""
        if until is None:
            return structs.replace(self, until=None, holds_rest=holds_rest, is_void=False)
        counted_from, num_counted = (self.counted_from, self.num_counted + 1) if self._is_counted(now) else (now, 1)
        return structs.replace(self, until=until, counted_from=counted_from, num_counted=num_counted, is_void=False)


class AdmissionGate:
    """The admission policy of a run and the requests that it has deferred."""

    def __init__(
        self,
        make_policy: Callable[[], AdmissionPolicy],
        name: str,
        replicasets: Mapping[str, Replicaset],
        models: Mapping[str, object] | None = None,
    ) -> None:
        """Create the gate. `models`: model of each replicaset, if the policy may send a request only to replicasets of
        the same model; None: the policy may send a request to any replicaset.
        """
        self.name = name
        self.error: PolicyError | None = None
        """Violation of the contract by the policy; None if there was none."""
        self.on_room: Callable[[], None] | None = None
        """Callback of the driver that calls the policy again in this tick for requests deferred with `until` None."""
        self.num_fruitless = 0
        """Number of consecutive deferrals while every request that had not ended was deferred."""
        self._make_policy = make_policy
        self._models = models
        self._deferred: dict[Request, Deferral] = {}
        self._num_deferred: Counter[str] = Counter()
        self._timeless: SortedKeyList[Request, tuple[int, int]] = SortedKeyList(
            key=lambda one: (one.priority, one.index)
        )
        """Requests deferred with `Defer.until` None, by priority and then in order of submission."""
        self._views = [_ReplicasetSight(one, self._num_deferred) for one in replicasets.values()]
        self._replicasets = dict(replicasets)
        self.renew()
        if self.own != NOBODY:
            for one in self._replicasets.values():
                if one.policies is not None:
                    bind_all(one, one.policies, None)

    def renew(self) -> None:
        """Rebuild the policy; the new one receives request events once the replicasets' policies are bound again."""
        before, self.policy = getattr(self, "policy", None), self._make_policy()
        self.error = None
        self.own: Listeners = listeners_among(((self.policy, self.name),))
        """Callbacks of the policy."""
        for one in self._replicasets.values():
            if one.policies is not None:
                others = (each for each in one.policies.beside if each[0] is not before)
                one.policies.beside = (*others, (self.policy, self.name))

    # Deferred requests

    def __len__(self) -> int:
        """Return the number of deferred requests."""
        return len(self._deferred)

    def num_deferred(self, replicaset: str) -> int:
        """Return the number of deferred requests of the replicaset with this name."""
        return self._num_deferred[replicaset]

    @property
    def waits_for_change(self) -> bool:
        """True if some deferred request has no time at which the policy is called again."""
        return bool(self._timeless)

    def keep(self, deferral: Deferral, decision: Defer, now: int) -> None:
        """Keep a deferred request until the next call of the policy."""
        request, until = deferral.request, decision.until
        tick = None if until is None else max(_tick_from(until), now + 1)
        if request.state is not RequestState.DEFERRED:
            request.move_to(RequestState.DEFERRED)
        self._deferred[request] = deferral.following(tick, decision.holds_rest, now)
        self._num_deferred[request.replicaset] += 1
        if until is None:
            self._timeless.add(request)

    def forget(self, request: Request, now: float) -> Deferral | None:
        """Remove the deferral of a request that has ended, or about which the policy has decided again, and store in
        the request the seconds since its first deferral. Return the deferral; None if the request is not deferred.
        """
        deferral = self._deferred.pop(request, None)
        if deferral is None:
            return None
        deferral.is_void = True
        self._num_deferred[request.replicaset] -= 1
        if deferral.until is None:
            self._timeless.remove(request)
        admission = request.admission
        assert admission is not None
        assert admission.deferred_at is not None
        admission.deferred_s = to_seconds(to_ticks(now) - to_ticks(admission.deferred_at))
        return deferral

    def deferral_of(self, request: Request) -> Deferral:
        """Return the deferral of a deferred request."""
        return self._deferred[request]

    def timeless(self) -> list[Request]:
        """Return the requests deferred with `Defer.until` None, by priority and then in order of submission."""
        return list(self._timeless)

    def holds_rest(self, request: Request) -> bool:
        """Return True if a request is deferred with `Defer.until` None and `Defer.holds_rest`: the requests of its
        replicaset that follow it in `timeless` then wait until it is no longer deferred.
        """
        deferral = self._deferred.get(request)
        return deferral is not None and deferral.until is None and deferral.holds_rest

    # Calling the policy

    def ask(self, request: Request, now: float) -> AdmissionDecision:
        """Call the policy for a request and return its decision, checked. Raises `PolicyError`, which is also stored as
        `error`.
        """
        try:
            decision: object = self.policy.admit(request, self._views, now)
            return self._checked(decision, request, now)
        except PolicyError as error:
            self.error = error
            raise
        except VajraError:
            raise
        except POLICY_EXCEPTIONS as error:
            self.error = PolicyError.caused_by(self.name, error, request_id=request.request_id)
            raise self.error from error

    def _checked(self, decision: object, request: Request, now: float) -> AdmissionDecision:
        wrong: str | None = "answered with something else than Accept, Refuse or Defer"
        if isinstance(decision, Accept):
            wrong = self._wrong_accept(decision, request)
        elif isinstance(decision, Refuse):
            wrong = _wrong_refusal(decision)
        elif isinstance(decision, Defer):
            wrong = _wrong_deferral(decision, now)
            deferral = self._deferred.get(request)
            if decision.until is not None and deferral is not None and deferral.is_last(to_ticks(now)):
                wrong = wrong or f"deferred a request {MAX_DEFERRALS:,} times within {DEFERRALS_S:g} s, and again"
        if wrong is None:
            assert isinstance(decision, Accept | Refuse | Defer)
            return decision
        raise self.violation(f"{wrong} (got {decision!r})", request)

    def _wrong_accept(self, decision: Accept, request: Request) -> str | None:
        most: object = decision.max_tokens  # a plug-in may return anything
        slo_class: object = decision.slo_class
        name = decision.replicaset
        if most is not None and (isinstance(most, bool) or not isinstance(most, Integral) or int(most) < 1):
            return "accepted a request with a max_tokens that is not a whole number of at least 1"
        if slo_class is not None and not isinstance(slo_class, str):
            return "accepted a request with an slo_class that is not a name"
        if name is None or name == request.replicaset:
            return None
        if name not in self._replicasets:
            return f"sent a request to a replicaset that there is not. Replicasets: {', '.join(self._replicasets)}"
        models = self._models
        if models is not None and models[name] != models[request.replicaset]:
            return f"sent a request to a replicaset that serves another model than {request.replicaset}"
        return None

    def wake(self, key: str, now: float) -> None:
        """Call the policy's `on_wake`, if it has one. Raises `PolicyError`, which is also stored as `error`."""
        on_wake = getattr(self.policy, "on_wake", None)
        if on_wake is None:
            return
        try:
            on_wake(key, now)
        except PolicyError as error:
            self.error = error
            raise
        except VajraError:
            raise
        except POLICY_EXCEPTIONS as error:
            self.error = PolicyError.caused_by(self.name, error)
            raise self.error from error

    def violation(self, message: str, request: Request) -> PolicyError:
        """Return the error for an invalid decision of the policy about a request."""
        place = place_of_definition(self.policy.admit)
        return PolicyError(self.name, message, request_id=request.request_id, place=place)

    def note(self, request: Request, decision: AdmissionDecision, now: float) -> bool:
        """Store a decision in the request; return True if observers are to be notified."""
        before = request.admission
        if before is None:
            before = request.admission = Admission()
        was_deferred = before.num_deferrals > 0
        if isinstance(decision, Defer):
            before.outcome = "deferred"
            before.num_deferrals += 1
            before.deferral = decision.reason
            if before.deferred_at is None:
                before.deferred_at = now
            return True
        if isinstance(decision, Refuse):
            before.outcome, before.refusal = "refused", decision.reason
            before.retry_after_s = None if decision.retry_after_s is None else float(decision.retry_after_s)
            return True
        limit = request.max_tokens
        before.degraded = _degrade(request, decision)
        before.max_tokens = request.max_tokens if request.max_tokens < limit else None
        before.outcome = "degraded" if before.degraded else "accepted"
        return was_deferred or bool(before.degraded)

    def detail_of(self, decision: Refuse) -> str:
        """Return the reason that the client of a refused request gets."""
        return f"{SHED} {self.name}: {decision.reason}"


def _degrade(request: Request, decision: Accept) -> str:
    """Reduce a request's limits as the policy decided; return a description of the changes, empty if there are none.
    A change of the replicaset is only described; the controller makes it.
    """
    found = []
    if decision.max_tokens is not None and decision.max_tokens < request.max_tokens:
        request.max_tokens = int(decision.max_tokens)
        found.append(f"max_tokens={request.max_tokens}")
    if decision.slo_class is not None and decision.slo_class != request.slo_class:
        stated: Any = request  # `Any`: facts are typed as read-only, since only a degradation may change one
        stated.slo_class = decision.slo_class
        found.append(f"slo_class={decision.slo_class}")
    if decision.replicaset is not None and decision.replicaset != request.replicaset:
        found.append(f"replicaset={decision.replicaset}")
    return ", ".join(found)


def _wrong_refusal(decision: Refuse) -> str | None:
    reason: object = decision.reason  # a plug-in may return anything
    if not isinstance(reason, str) or not reason.strip():
        return "refused a request without a reason"
    wait_s = decision.retry_after_s
    if wait_s is not None and not (_is_number(wait_s) and wait_s >= 0):
        return "refused a request with a retry_after_s that is not a finite number of seconds, 0 or more"
    return None


def _wrong_deferral(decision: Defer, now: float) -> str | None:
    until, reason = decision.until, cast("object", decision.reason)  # a plug-in may return anything
    if not isinstance(reason, str):
        return "deferred a request for a reason that is no text"
    if not isinstance(cast("object", decision.holds_rest), bool):
        return "deferred a request with a holds_rest that is neither true nor false"
    if until is None:
        return None
    if not _is_number(until) or until > LAST_S:
        return f"deferred a request until a time that is not a number of seconds up to {LAST_S:,}"
    return None if until > now else f"deferred a request into the past (now is {now!r})"


def _is_number(value: object) -> bool:
    return isinstance(value, float | int | np.number) and not isinstance(value, bool) and math.isfinite(value)


def _tick_from(seconds: float) -> int:
    """Return the first tick at or after a time in seconds."""
    seconds = float(seconds)  # a NumPy number may have too few bits for a number of ticks
    tick = to_ticks(seconds)
    return tick if to_seconds(tick) >= seconds else tick + 1


class _ReplicasetSight:
    """`ReplicasetView` with live figures."""

    __slots__ = ("_num_deferred", "_replicaset", "name", "pools")

    def __init__(self, replicaset: Replicaset, num_deferred: Counter[str]) -> None:
        self._replicaset = replicaset
        self._num_deferred = num_deferred
        self.name = replicaset.name
        self.pools: Sequence[PoolView] = pool_loads(replicaset)

    @property
    def replicas(self) -> Sequence[ReplicaLoadView]:
        """Loads of the replicas, by id."""
        return self._replicaset.live_loads()

    @property
    def num_queued(self) -> int:
        """Number of waiting requests of the replicaset, without deferred ones."""
        return self._replicaset.num_queued

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens left to compute for the waiting requests of the replicaset, without deferred ones."""
        return self._replicaset.num_queued_tokens

    @property
    def num_deferred(self) -> int:
        """Number of deferred requests of the replicaset."""
        return self._num_deferred[self.name]
