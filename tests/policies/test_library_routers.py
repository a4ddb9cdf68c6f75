"""Choices of LMetric, consistent hashing, D2LPM and Mooncake's conductor, and requests that move when replicas go."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.policies.routing_views import Request, replicas
from vajra_policies.fairness.d2lpm import D2lpm, D2lpmConfig
from vajra_policies.routers.consistent_hashing import ConsistentHashing, ConsistentHashingConfig
from vajra_policies.routers.lmetric import Lmetric, LmetricConfig
from vajra_policies.routers.mooncake_conductor import MooncakeConductor

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


# D2LPM and Mooncake's conductor


@given(figures)
def test_with_an_unlimited_quantum_the_longest_match_wins(rows: list[Row]) -> None:
    policy = D2lpm(D2lpmConfig(quantum=1e12), 1)
    for _ in range(3):
        chosen = assign(policy, Request(160), views(rows))
        hits = [row[3] for row in rows]
        assert hits[chosen] == max(hits)
        assert rows[chosen][0] + rows[chosen][1] == min(row[0] + row[1] for row in rows if row[3] == max(hits))


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 50)), min_size=1, max_size=60), st.sampled_from([1.0, 500.0])
)
def test_what_a_tenant_is_charged_at_replicas_differs_by_a_quantum_and_a_request(
    requests: list[tuple[int, int]], quantum: float
) -> None:
    policy = D2lpm(D2lpmConfig(quantum=quantum, output_weight=1.0), 1)
    charged = [0.0] * 3
    hot = views([(0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)])  # all want the last one
    for prompt, output in requests:
        one: Any = Request(prompt + 1, tenant="t", num_output_tokens=output)
        chosen = assign(policy, one, hot)
        policy.on_departures([one], 1.0)
        charged[chosen] += prompt + 1 - (chosen == 2) + output
    assert max(charged) - min(charged) <= quantum + 351
    assert assign(policy, Request(10, tenant="other"), hot) == 2, "deficits are the tenant's own"


def test_a_debt_of_a_whole_number_of_quanta_is_paid_whatever_is_rounded() -> None:
    """Prompt and outputs of a request, 4,096 tokens, are ten quanta."""
    policy, request = D2lpm(D2lpmConfig(), 8192), Request(4080, num_output_tokens=16)
    for _ in range(3):
        assert assign(policy, request, replicas(num_running=[0])) == 0
        policy.on_departures([request], 1.0)  # type: ignore[list-item]


class Prefill:
    """A prompt takes the time of its tokens, and more for each the further on they are."""

    def total_s(self, num_prompt_tokens: int) -> float:
        return self.remaining_s(num_prompt_tokens, 0)

    def remaining_s(self, num_prompt_tokens: int, num_done_tokens: int) -> float:
        return sum(1e-4 + 1e-7 * one for one in range(num_done_tokens, num_prompt_tokens))


@given(st.lists(st.tuples(st.integers(2, 300), st.lists(st.integers(0, 200), min_size=3, max_size=3)), max_size=12))
def test_the_least_predicted_time_to_first_token_wins(requests: list[tuple[int, list[int]]]) -> None:
    policy, times = MooncakeConductor(Prefill()), Prefill()
    sent: list[list[tuple[Any, int]]] = [[], [], []]
    for index, (prompt, hits) in enumerate(requests):
        one: Any = Request(prompt)
        predicted = []
        for replica in range(3):
            queued = sum(
                times.remaining_s(each.num_prompt_tokens, max(each.num_computed_tokens, hit))
                for each, hit in sent[replica]
                if not each.num_output_tokens
            )
            predicted.append(queued + times.remaining_s(prompt, min(hits[replica], prompt - 1)))
        chosen = assign(policy, one, replicas(hit_tokens=hits))
        assert predicted[chosen] == min(predicted)
        sent[chosen].append((one, min(hits[chosen], prompt - 1)))
        if index % 3 == 0:  # its prompt is computed
            one.num_output_tokens = 1


def test_a_request_with_its_prompt_computed_goes_where_the_conductor_has_the_fewest() -> None:
    policy: Any = MooncakeConductor(Prefill())
    request: Any = Request(100, is_prefill_complete=True)
    assert assign(policy, request, replicas(num_running=[3, 1, 2])) == 1
