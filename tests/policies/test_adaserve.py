"""AdaServe: drafts go where a TPOT SLO needs them, then where they are accepted most likely."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.routing_views import context
from vajra_policies.slo.adaserve import AdaServe, AdaServeConfig, Wish, shares
from vajra_py.runtime.step.builder_options import DraftRules
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.acceptance import RatesByPosition
from vajra_py.testing import Harness, HarnessOptions

DEPTH = 3


def expected(chance: float, num_drafts: int) -> float:
    return sum(chance**power for power in range(num_drafts + 1))


def fewest(wish: Wish) -> int:
    """Drafts that a wish needs; all, where even these are too few."""
    return next((num for num in range(DEPTH) if expected(wish.chance, num) >= wish.needed), DEPTH)


@given(
    st.lists(st.builds(Wish, st.floats(0, 4), st.floats(0.05, 0.95)), min_size=1, max_size=3),
    st.integers(0, 9),
)
def test_the_greedy_choice_is_as_good_as_exhaustive_search(wishes: list[Wish], num_drafts: int) -> None:
    given_ = shares(wishes, num_drafts, DEPTH, DEPTH)
    assert sum(given_) == min(num_drafts, DEPTH * len(wishes))
    assert all(0 <= num <= DEPTH for num in given_)
    least = [fewest(wish) for wish in wishes]
    if sum(least) > num_drafts:
        left = num_drafts
        for index in sorted(range(len(wishes)), key=lambda one: -wishes[one].needed):
            assert given_[index] == min(least[index], left)  # the greatest needs first
            left -= given_[index]
        return
    choices = [choice for choice in product(*(range(num, DEPTH + 1) for num in least)) if sum(choice) <= num_drafts]

    def value(choice: tuple[int, ...]) -> float:
        return sum(expected(wish.chance, num) for wish, num in zip(wishes, choice, strict=True))

    assert all(num >= need for num, need in zip(given_, least, strict=True))
    assert value(tuple(given_)) == pytest.approx(max(map(value, choices)))


def test_the_tight_slo_gets_the_scarce_drafts_and_a_faster_pace() -> None:
    options = HarnessOptions(
        drafts=DraftRules(num_tokens=0, max_tokens=4),
        acceptance=RatesByPosition([0.8], SeedTree(0), endless=True),
    )
    harness = Harness("fcfs", "round_robin", ("adaserve", {"budget_tokens": 5}), options)
    tight = harness.submit("tight", num_prompt_tokens=8, num_output_tokens=60, tpot_slo_s=0.001)
    loose = harness.submit("loose", num_prompt_tokens=8, num_output_tokens=60, tpot_slo_s=1.0)
    while tight.end_reason is None:
        harness.step()
    assert loose.num_draft_tokens == 0
    assert loose.num_output_tokens < tight.num_output_tokens / 2
    harness.steps_until_idle()
    assert loose.num_output_tokens == 60


def test_a_request_that_is_on_pace_needs_no_drafts() -> None:
    """Steps take 5.3 ms. The token that each decode has anyway is more than the SLO asks for; the draft goes to the first of equals."""
    options = HarnessOptions(
        drafts=DraftRules(num_tokens=0, max_tokens=4), acceptance=RatesByPosition([0.8], SeedTree(0))
    )
    harness = Harness("fcfs", "round_robin", ("adaserve", {"budget_tokens": 3}), options)
    harness.submit("free", 8, 60)
    harness.submit("on pace", 8, 60, tpot_slo_s=0.01)
    harness.step()
    done = harness.step()
    assert done is not None
    assert done.tokens == {"free": 2, "on pace": 1}


def test_without_drafts_it_decides_as_fixed_chunk() -> None:
    steps = []
    for policy in (("adaserve", {"chunk_size": 24}), ("fixed_chunk", {"chunk_size": 24})):
        harness = Harness("fcfs", "round_robin", policy, HarnessOptions())
        for number in range(6):
            harness.submit(f"r{number}", num_prompt_tokens=10 + 7 * number, num_output_tokens=9, tpot_slo_s=0.01)
        steps.append(harness.steps_until_idle())
    assert steps[0] == steps[1]


@dataclass(eq=False)
class Decode:
    """A decode that has come from another replica, with the attributes that the policy reads."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_output_tokens: int = 500
    tpot_slo_s: float | None = 0.02
    tbt_slo_s: float | None = None


def test_tokens_count_from_the_moment_from_which_time_counts() -> None:
    scheduler = AdaServe(AdaServeConfig(), context())
    request: Any = Decode()
    assert scheduler._wish(request, 0.02, 100.0).needed == pytest.approx(1.0)
    request.num_output_tokens = 501
    assert scheduler._wish(request, 0.02, 105.0).needed == pytest.approx(250.0), "251 tokens were due, and one came"
