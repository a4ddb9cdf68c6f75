"""What do long prefills leave to short ones, and what do classes leave to each other?"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vajra_policies.space_sharing import spared_fraction
from vajra_py.config import config_from_mapping
from vajra_py.contract import KeyMotion, RequestView
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency import AffineModel
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.harness import Harness, HarnessOptions, PolicySource, Step
from vajra_py.workload.request import PromptContent

SIZES = HarnessOptions(num_blocks=1000, latency=AffineModel(base_s=0.0, per_token_s=1e-4), check_conservation=False)


class FixedSlack:
    """A prioritizer whose slack is given, as part of an allowed time of ten seconds; its keys are no slack, but in the same order."""

    key_motion = KeyMotion.ARBITRARY

    def __init__(self, **slacks: float) -> None:
        self.slacks = slacks

    def key(self, request: RequestView, now: float) -> float:
        return 1000.0 + self.slacks[request.request_id]

    def slack_s(self, request: RequestView, now: float) -> float:
        return 10.0 * self.slacks[request.request_id]

    def slack_fraction(self, request: RequestView, now: float) -> float:
        return self.slacks[request.request_id]


def harness_with(prioritizer: PolicySource, **params: Any) -> Harness:
    """A step of 0.05 s takes 500 tokens; a prefill is long from 1,000 tokens in KV on."""
    params = {"long_seq_kv_cache_len_threshold": 1000, **params}
    return Harness(prioritizer, "round_robin", ("space_sharing", params), SIZES)


def stepped(harness: Harness, num_steps: int = 1) -> Step:
    step = None
    for _ in range(num_steps):
        step = harness.step()
    assert step is not None
    return step


@pytest.mark.parametrize(
    ("slack", "long_tokens", "short_tokens"),
    [(-3.0, 480, 0), (0.0, 480, 0), (0.1, 448, 32), (0.3, 320, 160), (0.5, 224, 256), (0.9, 224, 256)],
)
def test_a_long_prefill_leaves_its_slack_to_others(slack: float, long_tokens: int, short_tokens: int) -> None:
    slacks = FixedSlack(long=slack, short=slack + 5)
    harness = harness_with(slacks)
    harness.submit("long", 4000)
    stepped(harness, 3)
    assert harness.request("long").num_computed_tokens == 1440
    harness.submit("short", 3000)
    tokens = stepped(harness).tokens
    assert tokens == {"long": long_tokens, **({"short": short_tokens} if short_tokens else {})}


def test_below_the_threshold_a_prompt_takes_the_whole_step() -> None:
    harness = harness_with(FixedSlack(long=0.5, short=2.0))
    harness.submit("long", 4000)
    harness.submit("short", 100)
    for done in (0, 480, 960):
        assert harness.request("long").num_computed_tokens == done
        assert stepped(harness).tokens == {"long": 480}
    assert stepped(harness).tokens == {"long": 224, "short": 100}


def test_one_long_prefill_a_step() -> None:
    slacks = FixedSlack(one=0.5, two=0.6, short=0.7)
    harness = harness_with(slacks)
    harness.submit("one", 3000)
    stepped(harness, 3)
    slacks.slacks["one"], slacks.slacks["two"] = 0.6, 0.5
    harness.submit("two", 3000)
    stepped(harness, 3)
    assert [harness.request(name).num_computed_tokens for name in ("one", "two")] == [1440, 1440]
    harness.submit("short", 100)
    assert stepped(harness).tokens == {"two": 224, "short": 100}, (
        "the second long one gets nothing, though there is time"
    )
    slacks.slacks["one"] = 0.4
    assert stepped(harness).tokens == {"one": 288}


def test_a_long_prompt_that_decodes_keeps_no_other_one_waiting() -> None:
    slacks = FixedSlack(one=0.5, two=0.6)
    harness = harness_with(slacks)
    harness.submit("one", 1500, 20)
    stepped(harness, 3)
    slacks.slacks["two"] = 0.4
    harness.submit("two", 3000)
    stepped(harness, 3)
    slacks.slacks["two"] = 0.6
    assert stepped(harness).tokens == {"one": 60}
    assert stepped(harness).tokens == {"one": 1, "two": 224}


def test_a_long_prompt_that_found_no_memory_keeps_no_other_one_waiting() -> None:
    slacks = FixedSlack(warm=0.0, long=0.5, hit=0.0)
    sizes = replace(SIZES, num_blocks=200, prefix_cache=PrefixCacheOptions())
    params = {"long_seq_kv_cache_len_threshold": 1000}
    harness = Harness(slacks, "round_robin", ("space_sharing", params), sizes)
    shared = ("shared", 1200)
    harness.submit("warm", 1200, content=PromptContent((shared,)))
    harness.steps_until_idle()
    harness.submit("long", 1800)
    stepped(harness, 3)
    harness.submit("hit", 2900, content=PromptContent((shared, ("own", 1700))))
    assert stepped(harness).tokens == {"long": 224}


def test_a_long_prefill_behind_short_ones_takes_no_more_than_its_part() -> None:
    slacks = FixedSlack(long=0.4, s1=0.0, s2=0.1)
    harness = harness_with(slacks)
    harness.submit("long", 4000)
    stepped(harness, 3)
    harness.submit("s1", 150)
    assert stepped(harness).tokens == {"s1": 150, "long": 128}  # its target is 30 ms
    harness.submit("s2", 290)
    assert stepped(harness).tokens == {"s2": 290}, "its part is used up by others"


def test_under_lrs_a_long_prefill_leaves_its_slack_at_first_and_takes_all_when_late() -> None:
    """Its deadline of 1.2 s is 1.5 times its 0.8 s of work: it begins with a third of slack and loses it by waiting."""
    harness = harness_with("lrs")
    harness.submit("long", 8000)
    stepped(harness, 3)
    slack = harness.prioritizer.key(harness.request("long"), harness.now)
    assert slack == pytest.approx(1 / 3, abs=0.05)
    harness.submit("short", 2000)  # with 0.5 s for 0.2 s of work it has more slack, so that it goes second
    first = stepped(harness).tokens
    assert first["long"] == pytest.approx((1 - slack) * 500, abs=32)
    assert first["short"] == pytest.approx(slack * 500, abs=32)
    harness.wait(10.0)
    while harness.request("short").end_reason is None:
        stepped(harness)
    harness.submit("new", 2000)
    assert harness.prioritizer.key(harness.request("long"), harness.now) < 0
    assert stepped(harness).tokens == {"long": 480}


@pytest.mark.parametrize(("slack", "fraction"), [(-1.0, 0.0), (0.2, 0.2), (0.5, 0.5), (17.0, 0.5)])
def test_at_most_half_of_a_step_is_left_to_others(slack: float, fraction: float) -> None:
    assert spared_fraction(slack) == fraction


def test_under_edf_a_long_prefill_leaves_its_slack_as_under_lrs() -> None:
    tokens: list[dict[str, int]] = []
    for prioritizer in ("lrs", "edf"):
        harness = harness_with(prioritizer)
        harness.submit("long", 8000)
        stepped(harness, 3)
        harness.submit("short", 20_000)  # its deadline is later, and it has as much slack
        tokens.append(stepped(harness).tokens)
    assert tokens[0] == tokens[1]
    assert 224 < tokens[0]["long"] < 480


@pytest.mark.parametrize("prioritizer", ["fcfs", "priority"])
def test_without_slack_it_is_refused_when_policies_are_built(prioritizer: str) -> None:
    settings = {
        "version": 1,
        "scheduling": {
            "request_prioritizer": prioritizer,
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": "space_sharing",
        },
        "replica": {"memory": {"num_blocks": 100}},
        "workload": {
            "type": "synthetic",
            "num_requests": 1,
            "arrivals": {"type": "poisson", "rate": 1},
            "prompt_tokens": {"type": "constant", "value": 8},
            "output_tokens": {"type": "constant", "value": 8},
        },
        "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
    }
    with pytest.raises(
        ConfigError, match=f"'{prioritizer}' does not predict slack, .*'space_sharing' needs.*lrs or edf"
    ):
        run_experiment(config_from_mapping(settings))


def test_the_cached_part_of_a_prompt_counts_as_processed() -> None:
    long: Any = SimpleNamespace(num_known_tokens=5000, num_computed_tokens=0)
    policy: Any = harness_with("lrs").replica_schedulers[0]
    for cached, expected in [(999, False), (1000, True)]:
        batch: Any = SimpleNamespace(cached_tokens=lambda request, cached=cached: cached)
        assert policy._is_long(long, batch) is expected


# Classes


def test_classes_keep_to_their_shares() -> None:
    slacks = FixedSlack(g=0.0, i=0.1, rest=0.2, other=0.3)
    harness = harness_with(slacks, class_shares={"gold": 0.5, "iron": 0.3})
    for name, slo_class in [("g", "gold"), ("i", "iron"), ("rest", ""), ("other", "unheard-of")]:
        harness.submit(name, 900, slo_class=slo_class)
    tokens = stepped(harness).tokens
    assert tokens == {"g": 224, "i": 128, "rest": 96}
    assert stepped(harness).tokens == tokens


def test_several_prompts_of_a_class_share_its_part() -> None:
    slacks = FixedSlack(a=0.0, b=0.1, c=0.2, i=0.3)
    harness = harness_with(slacks, class_shares={"gold": 0.5})
    for name in "abc":
        harness.submit(name, 100, slo_class="gold")
    harness.submit("i", 900, slo_class="iron")
    assert stepped(harness).tokens == {"a": 100, "b": 100, "c": 32, "i": 224}


def test_a_class_does_not_take_what_another_leaves() -> None:
    harness = harness_with(FixedSlack(g=0.0), class_shares={"gold": 0.2})
    harness.submit("g", 900, slo_class="gold")
    assert stepped(harness).tokens == {"g": 96}


def test_classes_can_be_tenants() -> None:
    harness = harness_with(FixedSlack(a=0.0, b=0.1), class_shares={"ann": 0.2, "bob": 0.8}, class_by="tenant")
    harness.submit("a", 900, tenant="ann", slo_class="bob")
    harness.submit("b", 900, tenant="bob", slo_class="bob")
    assert stepped(harness).tokens == {"a": 96, "b": 384}


def test_a_class_without_a_share_runs_when_nothing_else_does() -> None:
    harness = harness_with(FixedSlack(none=0.0, g=0.1), class_shares={"gold": 1.0})
    harness.submit("none", 64)
    harness.submit("g", 480, slo_class="gold")
    steps = harness.steps_until_idle()
    assert harness.controller.num_alive == 0
    assert steps[0].tokens["none"] == 32


def test_without_shares_classes_do_not_matter() -> None:
    harness = harness_with(FixedSlack(a=0.0, b=0.1))
    harness.submit("a", 400, slo_class="gold")
    harness.submit("b", 400, slo_class="iron")
    assert stepped(harness).tokens == {"a": 400, "b": 96}


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"class_shares": {"a": 0.7, "b": 0.4}}, "add up to 1.1"),
        ({"class_shares": {"a": 0.0}}, "class_shares"),
        ({"long_seq_kv_cache_len_threshold": 0}, "long_seq_kv_cache_len_threshold"),
        ({"class_by": "user"}, "class_by"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        harness_with("lrs", **params)
