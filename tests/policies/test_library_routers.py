"""Choices of LMetric and consistent hashing, and requests that move when replicas go."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.policies.routing_views import Request, replicas
from vajra_policies.routers.consistent_hashing import ConsistentHashing, ConsistentHashingConfig
from vajra_policies.routers.lmetric import Lmetric, LmetricConfig

Row = tuple[int, int, int, int]
figures = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 5000), st.integers(0, 100)), min_size=2, max_size=8
)


def assign(policy: Any, request: Any, replicas: list[Any]) -> int:
    chosen: int = policy.assign(request, replicas, 0.0)
    return chosen


def views(rows: list[Row], tokens: int = 1, requests: int = 1) -> list[Any]:
    running, waiting, pending, hits = zip(*rows, strict=True)
    return replicas(
        num_running=[requests * one for one in running],
        num_waiting=[requests * one for one in waiting],
        num_pending_tokens=[tokens * one for one in pending],
        hit_tokens=[tokens * one for one in hits],
    )


@given(figures, st.booleans(), st.booleans())
def test_the_least_product_wins(rows: list[Row], counts_pending: bool, counts_itself: bool) -> None:
    def score(row: Row) -> tuple[int, int]:
        num_tokens = 160 - row[3] + counts_pending * row[2]
        return num_tokens * (row[0] + row[1] + counts_itself), num_tokens

    policy = Lmetric(LmetricConfig(counts_pending=counts_pending, counts_itself=counts_itself))
    chosen = assign(policy, Request(160), views(rows))
    assert score(rows[chosen]) == min(score(row) for row in rows)


@given(st.lists(figures, min_size=1, max_size=5), st.integers(1, 50), st.integers(1, 50))
def test_rescaling_tokens_or_requests_changes_no_choice(many: list[list[Row]], tokens: int, requests: int) -> None:
    plain, scaled = (Lmetric(LmetricConfig(counts_itself=False)) for _ in range(2))
    for rows in many:
        one = assign(plain, Request(160), views(rows))
        assert one == assign(scaled, Request(160 * tokens), views(rows, tokens, requests))


def test_equal_replicas_take_turns_and_a_cached_prefix_beats_an_idle_one_unless_too_many_share_it() -> None:
    policy = Lmetric(LmetricConfig())
    idle = views([(0, 0, 0, 0)] * 3)
    assert [assign(policy, Request(), idle) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert assign(policy, Request(160), views([(0, 0, 0, 0), (0, 0, 0, 0), (2, 0, 0, 120)])) == 2
    assert assign(policy, Request(160), views([(4, 0, 0, 0), (9, 0, 0, 0), (9, 9, 0, 110)])) == 0


def hashing(num_replicas: int, factor: float | None) -> ConsistentHashing:
    return ConsistentHashing(ConsistentHashingConfig(max_load_factor=factor), num_replicas)


def test_when_a_replica_goes_its_sessions_alone_move() -> None:
    policy = hashing(6, None)
    sessions: list[Any] = [Request(session_id=f"s{index}") for index in range(600)]
    up = views([(0, 0, 0, 0)] * 6)
    before = [assign(policy, one, up) for one in sessions]
    up[2].is_up = False
    after = [assign(policy, one, up) for one in sessions]
    assert {now for was, now in zip(before, after, strict=True) if was == 2} == {0, 1, 3, 4, 5}
    assert all(was == now for was, now in zip(before, after, strict=True) if was != 2)
    assert max(Counter(before).values()) < 2 * 100


@given(st.lists(st.integers(0, 12), min_size=20, max_size=200), st.sampled_from([1.05, 1.25, 2.0]))
def test_no_replica_has_more_than_the_bound_however_skewed_sessions_are(sessions: list[int], factor: float) -> None:
    policy = hashing(5, factor)
    loads = [0] * 5
    for count, session in enumerate(sessions, 1):
        one: Any = Request(session_id=f"s{session}")
        chosen = assign(policy, one, views([(load, 0, 0, 0) for load in loads]))
        loads[chosen] += 1
        assert loads[chosen] <= ceil(factor * count / 5)
