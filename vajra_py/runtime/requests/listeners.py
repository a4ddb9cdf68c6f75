"""Delivery of request events to policies; errors in their callbacks are attributed to the policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, structs

from vajra_py.contract import EndedRun, EndedStep
from vajra_py.errors import POLICY_EXCEPTIONS, PolicyError, VajraError

Callback = Callable[..., None]
"""A method of `ListensToRequests`, wrapped so that errors are attributed to its policy."""


class Listeners(Struct, frozen=True):
    """Callbacks for each kind of event, in the order of the policies' layers.

    See `vajra_py.contract.ListensToRequests` and `ListensToCaches`.
    """

    arrivals: tuple[Callback, ...] = ()
    admissions: tuple[Callback, ...] = ()
    preemptions: tuple[Callback, ...] = ()
    moves: tuple[Callback, ...] = ()
    step_ends: tuple[Callback, ...] = ()
    step_runs: tuple[Callback, ...] = ()
    departures: tuple[Callback, ...] = ()
    blocks_stored: tuple[Callback, ...] = ()
    blocks_removed: tuple[Callback, ...] = ()
    caches_cleared: tuple[Callback, ...] = ()
    tier_blocks_stored: tuple[Callback, ...] = ()
    tier_blocks_removed: tuple[Callback, ...] = ()
    tiers_cleared: tuple[Callback, ...] = ()
    program_ends: tuple[tuple[Any, Callback], ...] = ()
    """Pairs of policy and callback. The policy identifies the callback, because a policy that listens in several
    replicasets must be notified only once.
    """
    across_replicas: bool = False
    """True if a listener may receive events of several replicas."""

    @property
    def listen_only_to_steps(self) -> bool:
        """True if all callbacks are for ends of steps."""
        return structs.replace(self, step_ends=(), step_runs=(), across_replicas=False) == NOBODY

    @property
    def listen_to_each_step(self) -> bool:
        """True if a policy must be notified of the end of every single step, because it has no callback for several
        equal steps at once.
        """
        return len(self.step_ends) > len(self.step_runs)

    @property
    def listen_to_content(self) -> bool:
        """True if a policy listens to changes of the content of prefix caches or memory tiers."""
        return bool(self.blocks_stored or self.blocks_removed or self.caches_cleared or self.listen_to_tiers)

    @property
    def listen_to_tiers(self) -> bool:
        """True if a policy listens to changes of the content of memory tiers below the devices."""
        return bool(self.tier_blocks_stored or self.tier_blocks_removed or self.tiers_cleared)


NOBODY = Listeners()


def listeners_among(policies: Iterable[tuple[Any, str]]) -> Listeners:
    """Return the callbacks of these policies, which are given as (policy, name for errors)."""
    named = list(policies)

    def of(method: str) -> tuple[Callback, ...]:
        found = ((getattr(policy, method, None), name) for policy, name in named)
        return tuple(_under_name(notify, name) for notify, name in found if notify is not None)

    program_ends = [(policy, getattr(policy, "on_program_end", None), name) for policy, name in named]
    listeners = Listeners(
        arrivals=of("on_arrivals"),
        admissions=of("on_admission"),
        preemptions=of("on_preemption"),
        moves=of("on_moved"),
        step_ends=of("on_step_end"),
        step_runs=of("on_step_run"),
        departures=of("on_departures"),
        blocks_stored=of("on_blocks_stored"),
        blocks_removed=of("on_blocks_removed"),
        caches_cleared=of("on_cache_cleared"),
        tier_blocks_stored=of("on_tier_blocks_stored"),
        tier_blocks_removed=of("on_tier_blocks_removed"),
        tiers_cleared=of("on_tier_cleared"),
        program_ends=tuple(
            (policy, _under_name(notify, name)) for policy, notify, name in program_ends if notify is not None
        ),
    )
    return structs.replace(listeners, across_replicas=listeners != NOBODY)


def _under_name(method: Callback, name: str) -> Callback:
    def notify(about: Any, *facts: Any) -> None:
        try:
            method(about, *facts)
        except VajraError:
            raise
        except POLICY_EXCEPTIONS as error:
            one = about[0] if isinstance(about, tuple | list) and len(about) == 1 else about
            violation = PolicyError.caused_by(name, error, request_id=getattr(one, "request_id", None))
            if isinstance(about, EndedStep | EndedRun):
                violation.at(about.replica_id, about.step_index)
            raise violation from error

    return notify
