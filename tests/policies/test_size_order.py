"""Order by size: who goes first, and SRPT against a model of one server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_policies.size.skip_join_mlfq import SkipJoinMlfq, SkipJoinMlfqConfig
from vajra_py.contract.policies import EndedStep
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec


def harness(prioritizer: Any, lengths: dict[str, int], batcher: str = "preemptive", **options: Any) -> Harness:
    predictor = OracleLengths(lengths)
    return Harness(prioritizer, "round_robin", batcher, HarnessOptions(output_lengths=predictor, **options))


def submit(one: Harness, lengths: dict[str, int], prompt: int = 10) -> None:
    for name, num_tokens in lengths.items():
        one.submit(name, prompt, num_tokens)


def ends(one: Harness) -> list[str]:
    return [name for step in one.steps_until_idle() for name in step.ended]


# Order


def test_the_shortest_job_goes_first_and_nobody_is_interrupted() -> None:
    lengths = {"long": 9, "short": 2, "middle": 5}
    one = harness("sjf", lengths, "fixed_chunk", max_batch_size=1)
    submit(one, {"long": 9})
    one.step()
    submit(one, {"short": 2, "middle": 5})
    assert ends(one) == ["long", "short", "middle"]


def test_what_is_left_counts_not_what_there_was() -> None:
    one = harness("srpt", {"old": 10, "new": 4}, max_batch_size=1)
    submit(one, {"old": 10})
    for _ in range(8):
        one.step()
    submit(one, {"new": 4})
    assert ends(one) == ["old", "new"], "two tokens are left of the old one"


@pytest.mark.parametrize(("prompt_weight", "first"), [(0.01, "short_prompt"), (0.0, "long_prompt")])
def test_prompts_count_by_their_weight(prompt_weight: float, first: str) -> None:
    one = harness(("sjf", {"prompt_weight": prompt_weight}), {"long_prompt": 5, "short_prompt": 6}, max_batch_size=1)
    one.submit("long_prompt", 500, 5)
    one.submit("short_prompt", 10, 6)
    assert ends(one)[0] == first


@pytest.mark.parametrize(
    ("fraction", "order"), [(1.0, ["new", "old"]), (0.8, ["new", "old"]), (0.5, ["old", "new"]), (0.0, ["old", "new"])]
)
def test_trail_lets_those_finish_that_are_far_on(fraction: float, order: list[str]) -> None:
    one = harness(("trail", {"preemptible_fraction": fraction}), {"old": 20, "new": 5}, max_batch_size=1)
    submit(one, {"old": 20})
    for _ in range(11):
        one.step()
    submit(one, {"new": 5})
    assert ends(one) == order


def test_trail_without_preemption_interrupts_nobody_after_the_first_token() -> None:
    one = harness(("trail", {"preemptible_fraction": 0.0}), {"old": 20, "new": 5}, max_batch_size=1)
    submit(one, {"old": 20})
    one.step()
    assert one.request("old").num_output_tokens == 1
    submit(one, {"new": 5})
    assert ends(one) == ["old", "new"]


def test_ranks_alone_matter_and_equal_those_of_shortest_job_first() -> None:
    lengths = {f"r{index}": (index * 7) % 11 + 1 for index in range(11)}
    orders = []
    for prioritizer in ("ltr", ("sjf", {"prompt_weight": 0.0})):
        one = harness(prioritizer, lengths, max_batch_size=2)
        submit(one, lengths)
        orders.append([step.tokens for step in one.steps_until_idle()])
    assert orders[0] == orders[1]


def test_a_starving_request_runs_before_others_for_a_while() -> None:
    lengths = {"long": 50} | {f"s{index}": 3 for index in range(30)}
    one = harness(("ltr", {"starvation_s": 0.2, "boost_steps": 5}), lengths, max_batch_size=1)
    submit(one, {"long": 50})
    served: list[tuple[str, float]] = []
    for index in range(30):  # there is always a short one that has just come
        submit(one, {f"s{index}": 3})
        for _ in range(3):
            step = one.step()
            assert step is not None
            served += [(name, step.formed_at) for name in step.tokens]
    first = next(index for index, (name, _) in enumerate(served) if name == "long")
    assert served[first][1] == pytest.approx(0.2, abs=0.01)
    assert [name for name, _ in served[first : first + 6]].count("long") == 5
    assert served[first + 5][0] != "long"


def test_the_response_ratio_lets_a_long_request_overtake_short_ones_that_come_later() -> None:
    one = harness(
        ("hrrn", {"prompt_weight": 0.0}), {"long": 20, "short": 2, "later": 2}, "fixed_chunk", max_batch_size=1
    )
    submit(one, {"long": 20})
    prioritizer, waited = one.prioritizer, 3.0
    long = one.request("long")
    one.wait(waited)
    later = one.submit("later", 10, 2)
    now = one.now
    assert prioritizer.key(long, now) < prioritizer.key(later, now)
    assert prioritizer.key(long, now) == pytest.approx(-waited / 20)
    assert prioritizer.key(later, now + waited) < prioritizer.key(long, now + waited), (
        "short ones age ten times as fast"
    )


# SRPT against a model


def model_of_one_server(requests: list[tuple[int, int]]) -> list[int]:
    """Steps at whose end each request (arrival step, size in steps) ends, least left first, ties by arrival and index."""
    left = [size for _, size in requests]
    ended = [0] * len(requests)
    now = 0
    while any(left):
        present = [index for index, (at, _) in enumerate(requests) if at <= now and left[index]]
        if present:
            served = min(present, key=lambda index: (left[index], requests[index][0], index))
            left[served] -= 1
            if not left[served]:
                ended[served] = now + 1
        now += 1
    return ended


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), min_size=1, max_size=25))
def test_each_request_ends_when_it_does_in_a_step_by_step_model_of_one_server(requests: list[tuple[int, int]]) -> None:
    requests.sort(key=lambda one: one[0])
    lengths = {f"r{index}": size for index, (_, size) in enumerate(requests)}
    options = HarnessOptions(
        num_blocks=400, max_batch_size=1, latency=AffineModel(base_s=1.0), output_lengths=OracleLengths(lengths)
    )
    one = Harness(("srpt", {"prompt_weight": 0.0}), "round_robin", "preemptive", options)
    specs = [RequestSpec(f"r{index}", float(at), 1, size) for index, (at, size) in enumerate(requests)]
    one.run(specs)
    ended = [round(one.request(spec.request_id).ended_at or 0.0) for spec in specs]
    assert ended == model_of_one_server(requests)


# Skip-join multi-level feedback queue


class Prefill:
    """A prompt takes 1 ms a token."""

    def total_s(self, num_prompt_tokens: int) -> float:
        return num_prompt_tokens / 1000

    def remaining_s(self, num_prompt_tokens: int, num_done_tokens: int) -> float:
        return max(0, num_prompt_tokens - num_done_tokens) / 1000


@dataclass(eq=False)
class Prompt:
    """A request of which nothing matters but its prompt."""

    num_prompt_tokens: int
    arrived_at: float = 0.0
    request_id: str = "prompt"


def level_after(policy: SkipJoinMlfq, request: Any, *durations: float) -> float:
    now = 0.0
    for duration in durations:
        policy.on_step_end(EndedStep(0, 0, now, now + duration, (request,), (1,)))
        now += duration
    return policy.key(request, now)[0]


@given(st.integers(1, 300_000))
def test_nobody_is_demoted_by_its_own_prompt(num_prompt_tokens: int) -> None:
    policy = SkipJoinMlfq(SkipJoinMlfqConfig(), Prefill())
    one: Any = Prompt(num_prompt_tokens=num_prompt_tokens)
    joined = policy.key(one, 0.0)[0]
    assert level_after(policy, one, num_prompt_tokens / 1000) == joined
    assert 0.01 * 2**joined >= num_prompt_tokens / 1000 or joined == 15


def test_without_skipping_a_prompt_of_fifty_quanta_passes_one_level_after_the_other() -> None:
    policy = SkipJoinMlfq(SkipJoinMlfqConfig(skips=False), Prefill())
    one: Any = Prompt(num_prompt_tokens=500)
    levels = [level_after(policy, one, 0.011)] + [
        level_after(policy, one, *[0.011] * 2**level) for level in range(1, 6)
    ]
    assert levels == [1, 2, 3, 4, 5, 6]


def test_the_starving_are_promoted_every_so_many_steps() -> None:
    policy = SkipJoinMlfq(SkipJoinMlfqConfig(promotion_steps=5), Prefill())
    starving: Any = Prompt(num_prompt_tokens=4000)
    other: Any = Prompt(num_prompt_tokens=1)
    assert policy.key(starving, 0.0)[0] == 9
    assert level_after(policy, other, 1.0, 1.0, 1.0, 1.0) > 0
    assert policy.key(starving, 4.0)[0] == 9
    num_named = policy.fallen_requests.num_named
    policy.on_step_end(EndedStep(0, 0, 4.0, 5.0, (other,), (1,)))
    assert policy.key(starving, 5.0)[0] == 0
    assert policy.fallen_requests.num_named > num_named
