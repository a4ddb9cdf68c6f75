"""Retention policies: the contract, and what each gives up first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from vajra_policies.retention.arc import ArcConfig
from vajra_py.contract import CachedBlock, KeyMotion, PolicyConfig, RetentionSpec
from vajra_py.plugins import load_registry
from vajra_py.testing import check_retention

POLICIES = load_registry().retention_policies


@pytest.mark.parametrize("name", POLICIES)
def test_it_keeps_the_contract(name: str) -> None:
    check_retention(POLICIES[name].spec)


@pytest.mark.parametrize(
    ("name", "params"),
    [("ttl", {"ttl_s": 0.2, "ttl_by_slo_class_s": {"batch": 0.0}}), ("session_pin", {"pin_s": 100.0}), ("slru", {"protected_threshold": 4}), ("continuum_pins", {"ttl_s": 100.0, "max_mean_gap_s": 100.0})],
)  # fmt: skip
def test_it_keeps_the_contract_with_other_parameters(name: str, params: dict[str, Any]) -> None:
    check_retention(POLICIES[name].spec, params)


def made(policy: type, **fields: Any) -> RetentionSpec:
    return RetentionSpec("made", PolicyConfig, lambda config, context: policy(), "For this test.", **fields)


def test_those_that_keep_the_order_of_release_say_so() -> None:
    follow = {name for name, one in POLICIES.items() if one.spec.follows_release}
    assert follow >= {"lru", "session_pin", "continuum_pins"}


class Plain:
    key_motion = KeyMotion.PROGRESS

    def key(self, block: CachedBlock, now: float) -> float:
        return block.last_used_at


class MovesByTime(Plain):
    def key(self, block: CachedBlock, now: float) -> float:
        return now - block.last_used_at


class MovesByUse(Plain):
    key_motion = KeyMotion.STATIC

    def key(self, block: CachedBlock, now: float) -> float:
        return block.num_uses


class NotANumber(Plain):
    def key(self, block: CachedBlock, now: float) -> float:
        return float("nan")


class Fails(Plain):
    def on_evicted(self, block: CachedBlock, now: float) -> None:
        raise KeyError(block.depth)


class OtherLine(Plain):
    key_motion = KeyMotion.TIME_LINEAR

    def line(self, block: CachedBlock) -> tuple[float, float]:
        return (block.last_used_at, 1.0)


class PinsForNegativeTimes(Plain):
    def pin_s(self, request: object, now: float) -> float:
        return -1.0


class HalfSegmented(Plain):
    def segment(self, block: CachedBlock) -> int:
        return 0


class OddSegment(HalfSegmented):
    def segment(self, block: CachedBlock) -> Any:
        return "old"

    def next_segment(self, now: float) -> int:
        return 0


class Random(Plain):
    def key(self, block: CachedBlock, now: float) -> float:
        return id(block) % 997


class Misspelt(Plain):
    def on_evict(self, block: CachedBlock, now: float) -> None:
        """Never called."""


class Wakes(Plain):
    def on_wake(self, key: str, now: float) -> None:
        """Never called."""


class FollowsCaches(Plain):
    def on_blocks_stored(self, replica_id: int, hashes: Sequence[object], now: float) -> None:
        """Never called."""


class NoExpiry(Plain):
    def expires_at(self, block: CachedBlock) -> Any:
        return "soon"


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        (MovesByTime, "key_motion is PROGRESS, and a key moved by itself"),
        (MovesByUse, "key_motion is STATIC, and a key moved"),
        (NotANumber, "key() is not finite numbers"),
        (Fails, "KeyError"),
        (OtherLine, "line() says"),
        (PinsForNegativeTimes, "a pin lasts a number of seconds (got -1.0)"),
        (HalfSegmented, "segment and next_segment belong together"),
        (OddSegment, "segment() is not a whole number (got 'old')"),
        (Misspelt, "nothing calls 'on_evict'"),
        (Wakes, "nothing calls 'on_wake'. Allowed: "),
        (FollowsCaches, "nothing calls 'on_blocks_stored'"),
        (NoExpiry, "expires_at() is not a time (got 'soon')"),
    ],
)
def test_a_breach_of_the_contract_is_named(policy: type, complaint: str) -> None:
    with pytest.raises(AssertionError) as raised:
        check_retention(made(policy))
    assert complaint in str(raised.value)


def test_a_false_claim_to_follow_release_is_named() -> None:
    with pytest.raises(AssertionError, match="follows_release is declared"):
        check_retention(replace(POLICIES["filo"].spec, follows_release=True))


def order_of(name: str, params: dict[str, Any], facts: Sequence[tuple[float, float, int, int]]) -> list[int]:
    """Positions in the order in which they go; facts: stored at, last used at, uses, priority."""

    class Block:
        def __init__(self, stored_at: float, last_used_at: float, num_uses: int, priority: int) -> None:
            self.stored_at, self.last_used_at = stored_at, last_used_at
            self.num_uses, self.priority = num_uses, priority
            self.request = type("Request", (), {"slo_class": "batch" if priority else "chat"})

    spec = POLICIES[name].spec
    policy: Any = spec.build(spec.config(**params), None)  # type: ignore[arg-type]
    blocks = [Block(*one) for one in facts]
    return sorted(range(len(blocks)), key=lambda position: policy.key(blocks[position], 100.0))


class Stored:
    """A cached block by its content."""

    last_used_at = 0.0

    def __init__(self, content: str) -> None:
        self.block_hash = content


class Capacity:
    """Context of a policy whose cache has so many blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.limits = self
        self.num_blocks = num_blocks


FACTS = [(1.0, 9.0, 1, 0), (2.0, 5.0, 3, 5), (3.0, 7.0, 2, 1), (4.0, 6.0, 1, 0)]


@pytest.mark.parametrize(
    ("name", "params", "order"),
    [
        ("lru", {}, [1, 3, 2, 0]),
        ("mru", {}, [0, 2, 3, 1]),
        ("fifo", {}, [0, 1, 2, 3]),
        ("filo", {}, [3, 2, 1, 0]),
        ("lfu", {}, [3, 0, 2, 1]),
        ("slru", {"protected_threshold": 2}, [3, 0, 1, 2]),
        ("slru", {"protected_threshold": 3}, [3, 2, 0, 1]),
        ("priority", {}, [1, 2, 3, 0]),
        ("ttl", {"ttl_s": 10.0, "ttl_by_slo_class_s": {"batch": 1.0}}, [1, 2, 3, 0]),
    ],
)
def test_who_goes_first(name: str, params: dict[str, Any], order: list[int]) -> None:
    assert order_of(name, params, FACTS) == order


def test_content_used_twice_outlives_a_scan_under_arc_and_misses_move_its_target() -> None:
    policy: Any = POLICIES["arc"].spec.build(ArcConfig(), Capacity(4))  # type: ignore[arg-type]
    twice, once, *scanned = (Stored(name) for name in ("twice", "once", "s1", "s2", "s3"))
    policy.on_stored([twice, once], 0.0)
    policy.on_used([twice], 1.0)
    for block in scanned:
        policy.on_stored([block], 2.0)
        assert policy.next_segment(2.0) == policy.segment(once), "the list of what was used once gives a victim"
    policy.on_evicted(once, 3.0)
    assert policy.segment(twice) != policy.segment(scanned[0])
    assert policy.target == 0.0
    policy.on_stored([Stored("once")], 4.0)
    assert policy.target == 1.0, "it was given up too early"
