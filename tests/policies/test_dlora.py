"""dLoRA: does the mode follow the load, do credits bound a wait, and do requests move where loads come apart?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.policies.routing_views import Replica, context
from vajra_policies.adapters.dlora import Dlora, DloraConfig, Thresholds
from vajra_py.config.adapters import AdaptersConfig
from vajra_py.contract import Layer
from vajra_py.latency import AffineModel
from vajra_py.plugins import build_policy
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec

ADAPTERS = AdaptersConfig.model_validate(
    {"max_loras": 3, "unmerged_factor": 1.8, "switch_s": 0.02, "models": [{"name": name} for name in "abc"]}
)


def harness(params: dict[str, Any] | None = None, **sizes: Any) -> Harness:
    latency = AffineModel(base_s=0.01)
    options = HarnessOptions(
        **{"max_batch_size": 10, "num_blocks": 400, "adapters": ADAPTERS, "latency": latency, **sizes}
    )
    return Harness("fcfs", "least_loaded", ("dlora", params or {}), options)


def submit(run: Harness, names: str, num_outputs: int = 20, which: str = "") -> None:
    for index, name in enumerate(names):
        run.submit(f"{name}{index}{which}", 16, num_outputs, adapter=name)


def policy_of(run: Harness) -> Dlora:
    (policy,) = run.replica_schedulers
    assert isinstance(policy, Dlora)
    return policy


def test_one_adapter_that_fills_the_batch_is_merged_and_even_loads_are_not() -> None:
    run = harness()
    submit(run, "ab" * 5)
    even = run.step()
    assert even is not None
    assert {name[0] for name in even.tokens} == {"a", "b"}
    assert policy_of(run).merged is None
    run = harness()
    submit(run, "aaaaaaaabaaa")
    skewed = run.step()
    assert skewed is not None
    assert {name[0] for name in skewed.tokens} == {"a"}
    assert len(skewed.tokens) == 10
    assert policy_of(run).merged == "a"


def test_merging_goes_on_below_the_share_at_which_it_begins_and_ends_below_the_other() -> None:
    """Six of a batch of ten are more than 15 / 27 of it, five are less; begun is only with all ten."""
    run = harness({"credit_bound": 1e9})
    submit(run, "aaaa", 1)
    submit(run, "aaaaaa", 3, "six")
    submit(run, "bbbbbccccc")
    for merged in ("a", "a", "a", None):
        run.step()
        assert policy_of(run).merged == merged
    run = harness({"credit_bound": 1e9})
    submit(run, "aaaaaabbbbb")
    run.step()
    assert policy_of(run).merged is None


def test_steps_of_several_adapters_take_longer_and_switches_take_time() -> None:
    run = harness()
    for name, duration in (("a", 0.03), ("a", 0.01), ("b", 0.03)):
        run.submit(f"{name}{run.now}", 16, 1, adapter=name)
        step = run.step()
        assert step is not None
        assert step.duration_s == pytest.approx(duration)
    submit(run, "abab", 2)
    durations = [step.duration_s for step in (run.step(), run.step()) if step is not None]
    assert durations == pytest.approx([0.018 + 0.02, 0.018])


def test_thresholds_follow_what_either_mode_would_have_run() -> None:
    """By hand: 10 steps of 10 merged take 0.15 s and a switch, unmerged 0.27 s."""
    thresholds = Thresholds(DloraConfig())
    assert (thresholds.begin, thresholds.stay) == (1.0, 0.015 / 0.027)
    for num_merged, begin in ((10, 0.95), (6, 0.95 * 1.1)):
        for _ in range(10):
            thresholds.count(num_merged, 10, "a", is_merged=True)
        thresholds.end_phase(was_merged=True)
        assert thresholds.begin == pytest.approx(begin)
    for num_merged, stay in ((10, 0.015 / 0.027 / 1.1), (5, 0.015 / 0.027 / 1.1 + 0.05)):
        for _ in range(10):
            thresholds.count(num_merged, 10, "a", is_merged=False)
        thresholds.end_phase(was_merged=False)
        assert thresholds.stay == pytest.approx(stay)
    thresholds.end_phase(was_merged=False)  # a phase without a step gives no information
    assert thresholds.stay == pytest.approx(0.015 / 0.027 / 1.1 + 0.05)


def test_credits_bound_the_steps_for_which_an_adapter_is_passed_over() -> None:
    """Each step gives b 1 / (r B) = 0.18 from a, so that it has 0.9 after five and goes first in the next."""
    run = harness({"credit_bound": 0.89})
    submit(run, "aaaab" + "a" * 16)
    steps = [run.step() for _ in range(6)]
    assert ["b4" in step.tokens for step in steps if step is not None] == [False] * 5 + [True]
    assert sum(policy_of(run).credits.values()) == pytest.approx(0.0)


@pytest.mark.parametrize("seed", range(4))
def test_credits_always_sum_to_nothing_and_everybody_is_served(seed: int) -> None:
    stream = np.random.default_rng(seed)
    run = harness({"credit_bound": 2.0, "chunk_size": 64}, num_blocks=40)
    specs = [
        RequestSpec(
            f"r{index}",
            0.01 * index,
            int(stream.integers(1, 100)),
            int(stream.integers(1, 30)),
            adapter=str(stream.choice(["a", "b", "c", ""], p=[0.7, 0.1, 0.1, 0.1])),
        )
        for index in range(120)
    ]
    run.run(specs)
    assert sum(policy_of(run).credits.values()) == pytest.approx(0.0)
    assert all(run.request(one.request_id).num_output_tokens == one.num_output_tokens for one in specs)


class Asked:
    """A request with an adapter, which decodes."""

    is_resident = is_prefill_complete = True
    is_swapped = False

    def __init__(self, adapter: str) -> None:
        self.adapter = adapter


def migration(**params: Any) -> Any:
    made = context(max_batch_size=4)
    return build_policy(Layer.REPLICASET_SCHEDULER, "dlora_migration", params, made)


def test_a_request_goes_where_the_fewest_batches_are_to_run() -> None:
    """Full batches of one adapter cost 0.6, of several 1; an absent adapter a little."""
    made = migration()
    for adapter in "aaaa":
        made.on_admission(Asked(adapter), 0, 0.0)
    for adapter in "aabb":
        made.on_admission(Asked(adapter), 1, 0.0)
    views = [Replica(0), Replica(1)]
    assert made.assign(Asked("a"), views, 0.0) == 0  # 0.6 against 1
    assert made.assign(Asked("c"), [*views, Replica(2)], 0.0) == 2
    assert made.assign(Asked("d"), [Replica(3), Replica(4, loaded_adapters=("d",))], 0.0) == 4


def test_moves_even_out_times_within_the_slots_of_the_target() -> None:
    """Twenty requests against none: ten might go, of adapters that the target has first, but of no more than it has slots."""
    made = migration(more_requests=8)
    for adapter in ["a"] * 12 + ["b"] * 5 + ["c"] * 3:
        made.on_admission(Asked(adapter), 0, 0.0)
    target = Replica(1, loaded_adapters=("b",), max_loras=2)
    moves = list(made.moves([Replica(0), target], 10.0))
    assert [move.request.adapter for move in moves] == ["b"] * 5 + ["c"] * 3
    assert {move.target for move in moves} == {1}
    for move in moves:
        made.on_moved(move.request, 0, 1, 10.1)
    assert not list(made.moves([Replica(0), target], 20.0))


def test_even_loads_stay_where_they_are() -> None:
    made = migration()
    for index in range(30):
        made.on_admission(Asked("a"), index % 2, 0.0)
    assert not list(made.moves([Replica(0), Replica(1)], 10.0))
