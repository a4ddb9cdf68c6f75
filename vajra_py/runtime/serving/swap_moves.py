"""Copies of swapped requests between a replica's device and host memory, while its steps run.

A swapped-out request may return only after its copy to the host is complete. A returning request holds its device
blocks from its admission on, waits for the copy, and is then like a request whose prefix was loaded from a lower tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, cast

from vajra_py.config import ReplicaConfig
from vajra_py.contract import ReplicaLimits
from vajra_py.errors import ConfigError, Problem
from vajra_py.runtime.kv import PagedKvMemory
from vajra_py.runtime.kv.interface import KvRequest
from vajra_py.runtime.kv.swaps import SwapsUnderWay
from vajra_py.runtime.movement.links import LinkOptions, Network
from vajra_py.runtime.movement.swap_rules import SwapRules
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.backend import R
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.services import DriverServices
from vajra_py.runtime.support.clock import to_seconds, to_ticks

_WHERE = "replica.memory.swap_link"
_GIGA = 10**9
_DEVICE, _HOST = 0, 1


def swap_rules(settings: Sequence[tuple[ReplicaConfig, ReplicaLimits]]) -> Sequence[SwapRules | None]:
    """Return the rules of each replica for swaps while steps run (None: the replica swaps between steps); empty if no
    replica has such rules. Raises `ConfigError`.
    """
    rules = [_rules_of(*each) for each in settings]
    return () if all(one is None for one in rules) else rules


def use_swap_links(driver: DriverServices[R]) -> None:
    """Let each replica with swap rules copy its swapped requests while steps run."""
    for name, replicaset in driver.controller.replicasets.items():
        for replica_id, rules in enumerate(replicaset.swaps):
            if rules is not None:
                SwapMoves(driver.replica(name, replica_id), rules, driver)


def _rules_of(settings: ReplicaConfig, limits: ReplicaLimits) -> SwapRules | None:
    config = settings.memory.swap_link
    if config is None:
        return None
    if limits.kv_parallel_groups > 1:
        message = f"KV of {limits.kv_parallel_groups} KV-parallel groups is swapped between steps alone"
        raise ConfigError(Problem(_WHERE, message, "Allowed: null, or kv_parallel.groups: 1"))
    num_bytes = limits.bytes_per_block
    if config.kv_bytes_per_token is not None:
        num_bytes = config.kv_bytes_per_token * limits.block_size
    if not num_bytes:
        message = "is missing, and the latency model does not know the KV size of a token"
        raise ConfigError(Problem(f"{_WHERE}.kv_bytes_per_token", message, "A number of bytes"))
    links = LinkOptions(
        bandwidth=config.bandwidth_gb_s * _GIGA,
        latency_ticks=to_ticks(config.latency_s),
        contention=config.contention,
    )
    return SwapRules(links, num_bytes, config.frees == "at_once")


class SwapMoves(Generic[R]):
    """Copies of one replica's swapped requests."""

    def __init__(self, one: R, rules: SwapRules, driver: DriverServices[R]) -> None:
        self.replicaset = one.replica.replicaset
        self._one = one
        self._driver = driver
        self._bytes_per_block = rules.bytes_per_block
        self._network = Network(rules.links)
        self._under_way: dict[Request, None] = {}
        self._ended: dict[Request, None] = {}
        """Requests whose copy has ended and was not handled yet."""
        self._scheduled_at: int | None = None
        self._memory = cast(PagedKvMemory, one.replica.memory)
        self._memory.swap_beside_steps(SwapsUnderWay(rules.frees_at_once, self._forget, self._clear))
        one.replica.builder.swap_beside_steps(self)

    def is_leaving(self, request: Request) -> bool:
        """See `SwapsBesideSteps`."""
        return request in self._under_way

    def leave(self, request: Request, num_blocks: int) -> None:
        """See `SwapsBesideSteps`."""
        self._start(request, (_DEVICE, _HOST), num_blocks)

    def come_back(self, request: Request, num_blocks: int) -> None:
        """See `SwapsBesideSteps`."""
        self._start(request, (_HOST, _DEVICE), num_blocks)

    def due(self) -> None:
        """Handle the copies that have ended by now."""
        driver, one = self._driver, self._one
        if self._scheduled_at is not None and self._scheduled_at <= driver.now:
            self._scheduled_at = None
        self._ended.update(dict.fromkeys(cast("list[Request]", self._network.ended(driver.now))))
        if self._ended:
            driver.touch(one)
        while self._ended:
            request = next(iter(self._ended))
            del self._ended[request], self._under_way[request]
            self._memory.end_swap(request)
            if request.state is RequestState.LOADING:
                one.replica.lifecycle.loaded(request, request.num_computed_tokens, to_seconds(driver.now))
            driver.wake(one)
        self._schedule()

    def _start(self, request: Request, ends: tuple[int, int], num_blocks: int) -> None:
        self._under_way[request] = None
        self._network.start(request, *ends, num_blocks * self._bytes_per_block, self._driver.now)
        self._schedule()

    def _forget(self, request: KvRequest) -> None:
        """Cancel the copy of a request that has left the replica, if there is one."""
        own = cast(Request, request)
        if own not in self._under_way:
            return
        del self._under_way[own]
        if own in self._ended:
            del self._ended[own]
        else:
            self._network.cancel(own, self._driver.now)
        self._memory.end_swap(own)
        self._schedule()

    def _clear(self) -> None:
        """Cancel all copies, because the replica has lost its memory."""
        for request in self._under_way:
            if request not in self._ended:
                self._network.cancel(request, self._driver.now)
        self._under_way.clear()
        self._ended.clear()
        self._schedule()

    def _schedule(self) -> None:
        tick = self._network.next_change()
        if tick is not None and (self._scheduled_at is None or tick < self._scheduled_at):
            self._scheduled_at = max(tick, self._driver.now)
            self._driver.events.push(self._scheduled_at, Phase.TIER, self)
