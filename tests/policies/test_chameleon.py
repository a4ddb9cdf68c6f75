"""Chameleon: do queues keep to their quotas, does everything return, and does the right adapter go?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_policies.adapters.chameleon import Chameleon
from vajra_policies.adapters.size_queues import cuts_of, quotas_of
from vajra_py.config.adapters import AdaptersConfig
from vajra_py.errors import PolicyError
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec


def adapters(max_loras: int, **blocks: int) -> AdaptersConfig:
    models = [{"name": name, "num_blocks": size} for name, size in blocks.items()]
    return AdaptersConfig.model_validate({"max_loras": max_loras, "models": models})


def workload(seed: int, count: int = 150) -> list[RequestSpec]:
    stream = np.random.default_rng(seed)
    at = np.cumsum(stream.exponential(0.01, count))
    return [
        RequestSpec(f"r{index}", float(at[index]), int(stream.choice([10, 40, 200])), int(stream.choice([2, 10, 40])))
        for index in range(count)
    ]


def harness(specs: Sequence[RequestSpec], params: dict[str, Any] | None = None, **sizes: Any) -> Harness:
    lengths = OracleLengths({spec.request_id: spec.num_output_tokens for spec in specs})
    options = HarnessOptions(**{"num_blocks": 60, "max_batch_size": 64, "output_lengths": lengths, **sizes})
    return Harness("fcfs", "least_loaded", ("chameleon", params or {}), options)


@pytest.mark.parametrize("seed", range(5))
def test_queues_keep_to_their_quotas_and_get_everything_back(seed: int) -> None:
    specs = workload(seed)
    run = harness(specs, {"refresh_s": 1e6})
    (policy,) = run.replica_schedulers
    assert isinstance(policy, Chameleon)
    take, most = policy._take, 60 * 16
    num_lent = 0

    def watched(request: Any, charges: list[tuple[int, int]], batch: Any, now: float) -> bool:
        nonlocal num_lent
        before = list(policy.queues.used)
        goes_on = take(request, charges, batch, now)
        if request in policy.queues._charges:
            assert sum(tokens for _, tokens in charges) == request.num_prompt_tokens + policy._lengths.total(request)
            assert all(
                policy.queues.used[queue] <= policy.queues.quotas[queue] or not before[queue] for queue, _ in charges
            )
            num_lent += any(queue != policy.queues.queue_of(request) for queue, _ in charges)
        return goes_on

    policy._take = watched  # type: ignore[method-assign]
    run.run(specs)
    assert num_lent
    assert len(policy.queues.quotas) > 1
    assert sum(policy.queues.quotas) <= most
    assert policy.queues.used == [0] * len(policy.queues.quotas)
    assert not policy.queues._charges
    assert not policy.queues._facts
    assert all(run.request(spec.request_id).num_output_tokens == spec.num_output_tokens for spec in specs)


def test_short_requests_pass_long_ones_that_fill_their_own_quota() -> None:
    first, names = workload(0, 100), [f"long{index}" for index in range(8)]
    then = [*(RequestSpec(name, 0.0, 200, 40) for name in names), RequestSpec("short", 0.0, 10, 2)]
    run = harness([*first, *then])
    for specs in (first, then):  # the first ones make the queues
        for spec in specs:
            run.submit_spec(spec)
        step = run.step()
        assert step is not None
        if specs is first:
            run.steps_until_idle()
    assert "short" in step.admitted
    assert not set(names) <= set(step.admitted)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 4))
def test_cuts_lie_between_the_means_of_neighbouring_queues(sizes: list[float], most: int) -> None:
    cuts = cuts_of(sizes, most)
    assert len(cuts) < most
    assert cuts == sorted(cuts)
    bounds = [-1.0, *cuts, 1e7]
    means = [float(np.mean([one for one in sizes if low <= one < high])) for low, high in pairwise(bounds)]
    assert cuts == pytest.approx([(low + high) / 2 for low, high in pairwise(means)])


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=4), st.integers(1, 10_000))
def test_small_sizes_have_what_they_need_first_and_nothing_is_given_twice(needs: list[float], total: int) -> None:
    quotas = quotas_of(needs, total)
    assert total - len(needs) < sum(quotas) <= total or sum(quotas) == total
    assert quotas[0] >= min(needs[0], total)


def test_the_adapter_with_the_least_score_goes() -> None:
    """b is small, and used as rarely as c; a was used most. The least recently used one would be a."""
    run = harness([], {"refresh_s": 1e6}, adapters=adapters(3, a=1, b=1, c=8, d=1))
    for name in ("a", "a", "a", "b", "c"):
        run.submit(f"{name}{run.now}", 16, 1, adapter=name)
        run.steps_until_idle()
    assert run.replica().adapters is not None
    run.submit("new", 16, 1, adapter="d")
    run.step()
    assert run.replica().adapters.loaded() == ("a", "c", "d")  # type: ignore[union-attr]


def test_of_two_adapters_used_as_often_the_later_one_stays_though_it_is_a_little_smaller() -> None:
    """Its size counts 0.45 * 5/6 in place of 0.45, and its recency 0.1 in place of 0."""
    run = harness([], {"refresh_s": 1e6}, adapters=adapters(2, earlier=6, later=5, new=1))
    for name in ("earlier", "later"):
        run.submit(name, 16, 1, adapter=name)
        run.steps_until_idle()
    run.submit("r", 16, 1, adapter="new")
    run.step()
    assert run.replica().adapters.loaded() == ("later", "new")  # type: ignore[union-attr]


def test_an_adapter_that_is_not_idle_is_refused_by_name() -> None:
    run = harness([], adapters=adapters(1, a=1, b=1))
    run.replica().adapters.chooses = lambda idle, now: "b"  # type: ignore[union-attr]
    run.submit("first", 16, 1, adapter="a")
    run.steps_until_idle()
    run.submit("second", 16, 1, adapter="b")
    with pytest.raises(PolicyError, match=r"second cannot have the slot of adapter 'b'.*Allowed: 'a'"):
        run.step()


def test_an_adapters_size_counts_as_the_size_of_its_requests() -> None:
    run = harness([], {"refresh_s": 1e6}, adapters=adapters(4, a=1, b=8))
    (policy,) = run.replica_schedulers
    for index in range(20):
        run.submit(f"r{index}", 64, 5, adapter="ab"[index % 2])
    run.step()
    small, large = (policy.queues.queue_of(run.request(name)) for name in ("r0", "r1"))
    assert small < large
