"""Deliver request events to policies and attribute their failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from vajra_py.contract import EndedRun, EndedStep
from vajra_py.errors import POLICY_EXCEPTIONS, PolicyError, VajraError

Told = Callable[..., None]
"""A listening method of `ListensToRequests`, with errors attributed to its policy."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Methods to call by event, in the order of the policies' layers.

    See `vajra_py.contract.ListensToRequests` and `ListensToCaches`.
    """

    arrivals: tuple[Told, ...] = ()
    admissions: tuple[Told, ...] = ()
    preemptions: tuple[Told, ...] = ()
    moves: tuple[Told, ...] = ()
    step_ends: tuple[Told, ...] = ()
    step_runs: tuple[Told, ...] = ()
    departures: tuple[Told, ...] = ()
    blocks_stored: tuple[Told, ...] = ()
    blocks_removed: tuple[Told, ...] = ()
    caches_cleared: tuple[Told, ...] = ()
    tier_blocks_stored: tuple[Told, ...] = ()
    tier_blocks_removed: tuple[Told, ...] = ()
    tiers_cleared: tuple[Told, ...] = ()
    program_ends: tuple[tuple[Any, Told], ...] = ()
    """Pairs of policy and callback; a policy may be among the listeners of several replicasets."""
    across_replicas: bool = False
    """True if one of them may know requests of several replicas."""

    @property
    def hear_steps_alone(self) -> bool:
        """True if nobody listens to anything but steps."""
        return replace(self, step_ends=(), step_runs=(), across_replicas=False) == NOBODY

    @property
    def hear_each_step(self) -> bool:
        """True if a listener to steps takes no runs of them."""
        return len(self.step_ends) > len(self.step_runs)

    @property
    def hear_content(self) -> bool:
        """True if a policy listens to the content of caches."""
        return bool(self.blocks_stored or self.blocks_removed or self.caches_cleared or self.hear_tiers)

    @property
    def hear_tiers(self) -> bool:
        """True if a policy listens to the content of memory tiers below the devices."""
        return bool(self.tier_blocks_stored or self.tier_blocks_removed or self.tiers_cleared)


NOBODY = Listeners()


def listeners_among(policies: Iterable[tuple[Any, str]]) -> Listeners:
    """Return the listening methods of these policies, each policy with its name for errors."""
    named = list(policies)

    def of(method: str) -> tuple[Told, ...]:
        found = ((getattr(policy, method, None), name) for policy, name in named)
        return tuple(_under_name(tell, name) for tell, name in found if tell is not None)

    program_ends = [(policy, getattr(policy, "on_program_end", None), name) for policy, name in named]
    heard = Listeners(
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
            (policy, _under_name(tell, name)) for policy, tell, name in program_ends if tell is not None
        ),
    )
    return replace(heard, across_replicas=heard != NOBODY)


def _under_name(method: Told, name: str) -> Told:
    def tell(about: Any, *facts: Any) -> None:
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

    return tell
