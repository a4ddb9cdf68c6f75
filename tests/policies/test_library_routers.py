"""Where do LMetric and consistent hashing send requests, and what moves when replicas go?"""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.policies.routing_views import Request, replicas
from vajra_policies.routers.consistent_hashing import ConsistentHashing, ConsistentHashingConfig
from vajra_policies.routers.lmetric import Lmetric, LmetricConfig

figures = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 5000), st.integers(0, 100)), min_size=2, max_size=8
)


def views(rows: list[tuple[int, int, int, int]], tokens: int = 1, requests: int = 1) -> list[Any]:
    running, waiting, pending, hits = zip(*rows, strict=True)
    return replicas(
        num_running=[requests * one for one in running],
        num_waiting=[requests * one for one in waiting],
        num_pending_tokens=[tokens * one for one in pending],
        hit_tokens=[tokens * one for one in hits],
    )


@given(figures, st.booleans())
def test_the_least_product_wins(rows: list[tuple[int, int, int, int]], counts_pending: bool) -> None:
    def score(row: tuple[int, int, int, int]) -> tuple[int, int]:
        num_tokens = 160 - row[3] + counts_pending * row[2]
        return num_tokens * (row[0] + row[1]), num_tokens

    chosen = Lmetric(LmetricConfig(counts_pending=counts_pending)).assign(Request(160), views(rows), 0.0)  # type: ignore[arg-type]
    assert chosen is not None
    assert score(rows[chosen]) == min(score(row) for row in rows)


@given(st.lists(figures, min_size=1, max_size=5), st.integers(1, 50), st.integers(1, 50))
def test_rescaling_tokens_or_requests_changes_no_choice(many: list[Any], tokens: int, requests: int) -> None:
    plain, scaled = Lmetric(LmetricConfig()), Lmetric(LmetricConfig())
    for rows in many:
        one = plain.assign(Request(160), views(rows), 0.0)  # type: ignore[arg-type]
        other = scaled.assign(Request(160 * tokens), views(rows, tokens, requests), 0.0)  # type: ignore[arg-type]
        assert one == other


def test_idle_replicas_take_turns_and_a_cached_prefix_breaks_the_tie() -> None:
    policy = Lmetric(LmetricConfig())
    idle = views([(0, 0, 0, 0)] * 3)
    assert [policy.assign(Request(), idle, 0.0) for _ in range(5)] == [0, 1, 2, 0, 1]  # type: ignore[arg-type]
    assert policy.assign(Request(), views([(0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 64)]), 0.0) == 2  # type: ignore[arg-type]


def hashing(num_replicas: int, factor: float | None) -> ConsistentHashing:
    return ConsistentHashing(ConsistentHashingConfig(max_load_factor=factor), num_replicas)


def test_when_a_replica_goes_its_sessions_alone_move() -> None:
    policy = hashing(6, None)
    sessions: list[Any] = [Request(session_id=f"s{index}") for index in range(600)]
    up = views([(0, 0, 0, 0)] * 6)
    before = [policy.assign(one, up, 0.0) for one in sessions]
    up[2].is_up = False
    after = [policy.assign(one, up, 0.0) for one in sessions]
    assert {now for was, now in zip(before, after, strict=True) if was == 2} == {0, 1, 3, 4, 5}
    assert all(was == now for was, now in zip(before, after, strict=True) if was != 2)
    assert max(Counter(before).values()) < 2 * 100


@given(st.lists(st.integers(0, 12), min_size=20, max_size=200), st.sampled_from([1.05, 1.25, 2.0]))
def test_no_replica_has_more_than_the_bound_however_skewed_sessions_are(sessions: list[int], factor: float) -> None:
    policy = hashing(5, factor)
    loads = [0] * 5
    for count, session in enumerate(sessions, 1):
        one: Any = Request(session_id=f"s{session}")
        chosen = policy.assign(one, views([(load, 0, 0, 0) for load in loads]), 0.0)
        assert chosen is not None
        loads[chosen] += 1
        assert loads[chosen] <= ceil(factor * count / 5)
