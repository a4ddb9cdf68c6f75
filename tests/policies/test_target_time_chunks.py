"""Are the chunks of a target time the largest that keep to it, whatever the latency model, the batch and the bounds?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_policies.dynamic_chunk import DynamicChunk, DynamicChunkConfig
from vajra_policies.target_time import ChunkSizes, largest_that_fits
from vajra_py.contract import BatchFeatures, ChunksSoloPrompts, ReplicaScheduler
from vajra_py.errors import ConfigError
from vajra_py.latency import AffineModel
from vajra_py.testing.harness import Harness, HarnessOptions, Step


def dynamic(**params: Any) -> tuple[str, dict[str, Any]]:
    return "dynamic_chunk", params


def stepped(harness: Harness) -> Step:
    step = harness.step()
    assert step is not None
    return step


def allowed_sizes(min_chunk: int, remaining: int, cap: int) -> list[int]:
    """By the rule's own words: multiples of 32 within the bounds, or all that remains, if the cap lets it."""
    sizes = {n for n in range(32, cap + 1, 32) if min_chunk <= n <= remaining}
    if remaining <= cap:
        sizes.add(remaining)
    return sorted(sizes)


@given(st.integers(1, 8).map(lambda n: 32 * n), st.integers(1, 700), st.integers(1, 700))
def test_sizes(min_chunk: int, remaining: int, cap: int) -> None:
    sizes = ChunkSizes(min_chunk, remaining, cap)
    assert [sizes[i] for i in range(sizes.count)] == allowed_sizes(min_chunk, remaining, cap)


@given(st.integers(1, 400), st.integers(-1, 420), st.integers(0, 20_000))
def test_search_finds_the_largest_from_any_guess(count: int, last_that_fits: int, guess: int) -> None:
    sizes = ChunkSizes(32, 32 * count + 7, 32 * count)
    assert sizes.count == count
    asked = []

    def fits(num_tokens: int) -> bool:
        asked.append(num_tokens)
        return num_tokens <= 32 * (last_that_fits + 1)

    found = largest_that_fits(sizes, fits, guess)
    assert found == 32 * (min(max(last_that_fits, 0), count - 1) + 1)
    assert len(asked) == len(set(asked)) <= 2 * count.bit_length()


def test_a_prompt_that_fits_whole_is_asked_about_once() -> None:
    asked = []
    largest_that_fits(ChunkSizes(32, 300, 8192), lambda n: not asked.append(n), 512)  # type: ignore[func-returns-value]
    assert asked == [300]


# Against brute force, on the real mechanism

models = st.builds(
    AffineModel,
    base_s=st.sampled_from([0.0, 0.004, 0.2]),
    per_token_s=st.sampled_from([1e-6, 1e-5, 1e-4]),
    per_request_s=st.sampled_from([0.0, 1e-3]),
    per_prefill_pair_s=st.sampled_from([0.0, 1e-8, 1e-7]),
    per_decode_context_token_s=st.sampled_from([0.0, 1e-6]),
)


@settings(max_examples=60)
@given(
    models,
    st.sampled_from([0.01, 0.05, 0.1]),
    st.sampled_from([(32, 8192), (64, 256), (32, 32), (128, 8192)]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([None, 50, 700]),
    st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_every_chunk_is_the_largest_that_keeps_to_the_target(
    latency: AffineModel,
    target_s: float,
    bounds: tuple[int, int],
    tolerance: float,
    max_batch_tokens: int | None,
    prompts: list[int],
    num_decodes: int,
) -> None:
    sizes = HarnessOptions(
        num_blocks=1500,
        max_batch_size=64,
        max_batch_tokens=max_batch_tokens,
        latency=latency,
        check_conservation=False,
    )
    params = {"target_batch_time_s": target_s, "min_chunk": bounds[0], "max_chunk": bounds[1]}
    harness = Harness("fcfs", "round_robin", dynamic(tolerance_fraction=tolerance, **params), sizes)
    for index in range(num_decodes):
        harness.submit(f"d{index}", 20 + 100 * index, 400)
    for _ in range(12):
        harness.step()
    for index, tokens in enumerate(prompts):
        harness.submit(f"p{index}", tokens)
    for _ in range(8):
        step = harness.step()
        if step is None:
            return
        check_step(harness, step, BruteForce(latency, target_s, bounds, tolerance, max_batch_tokens))


class BruteForce:
    """The rule by trying every size."""

    def __init__(
        self, latency: AffineModel, target_s: float, bounds: tuple[int, int], tolerance: float, budget: int | None
    ) -> None:
        self.latency, self.target_s, self.tolerance = latency, target_s, tolerance
        self.min_chunk, self.max_chunk = bounds
        self.tokens_left = budget if budget is not None else 1 << 60
        self.features = BatchFeatures()

    def take_decode(self, context: int) -> None:
        self.features = self.features.with_decodes(1, context)
        self.tokens_left -= 1

    def take_prompt(self, remaining: int, context: int) -> int:
        """The chunk that the prompt gets; 0: nothing."""
        if not self.tokens_left:
            return 0
        is_empty = self.features.num_requests == 0
        if not is_empty and self.latency.stage_time_s(self.features) > (1 - self.tolerance) * self.target_s:
            return 0
        cap = min(self.max_chunk, self.tokens_left)
        sizes = allowed_sizes(self.min_chunk, remaining, cap)
        if not sizes:
            chunk = cap if is_empty else 0
        else:
            chunk = max((n for n in sizes if self.time_with(n, context) <= self.target_s), default=sizes[0])
        if chunk:
            self.features = self.features.with_chunk(chunk, context)
            self.tokens_left -= chunk
        return chunk

    def time_with(self, num_tokens: int, context: int) -> float:
        return self.latency.stage_time_s(self.features.with_chunk(num_tokens, context))


def check_step(harness: Harness, step: Step, brute: BruteForce) -> None:
    """Under FCFS the prompts stand in the order of submission, so that the whole step can be worked out again."""
    before = {entry.request_id: entry.num_computed_before for entry in step.entries}
    expected = {}
    for entry in step.entries:
        request = harness.request(entry.request_id)
        if entry.kind == "running" and entry.num_computed_before >= request.num_prompt_tokens:
            brute.take_decode(entry.num_computed_before)
            expected[entry.request_id] = 1
    names = [one for one in harness._recorder.requests if one not in expected]
    for name in names:
        request = harness.request(name)
        done = before.get(name, request.num_computed_tokens if request.end_reason is None else None)
        if done is None or done >= request.num_prompt_tokens:
            continue
        chunk = brute.take_prompt(request.num_prompt_tokens - done, done)
        if chunk:
            expected[name] = chunk
    assert step.tokens == expected


# Manually calculated examples


def test_the_chunk_shrinks_with_the_context_behind_it() -> None:
    latency = AffineModel(base_s=0.01, per_token_s=1e-5, per_prefill_pair_s=1e-8)
    sizes = HarnessOptions(num_blocks=5000, latency=latency, check_conservation=False)
    harness = Harness("fcfs", "round_robin", dynamic(), sizes)
    harness.submit("long", 60_000)
    steps = harness.steps_until_idle()
    chunks = [step.num_tokens for step in steps]
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert chunks[0] > 4 * chunks[-2]
    assert all(chunk % 32 == 0 for chunk in chunks[:-1])
    assert sum(chunks) == 60_000
    assert all(step.duration_s <= 0.05 for step in steps)


def test_decodes_are_paid_for_first() -> None:
    latency = AffineModel(base_s=0.0, per_token_s=1e-4, per_request_s=1e-3)
    sizes = HarnessOptions(num_blocks=200, latency=latency, max_batch_size=64)
    harness = Harness("fcfs", "round_robin", dynamic(), sizes)
    for index in range(20):
        harness.submit(f"d{index}", 1, 50)
    stepped(harness)
    harness.submit("prompt", 1000)
    step = stepped(harness)  # 20 decodes take 22 ms; 1 ms and 270 tokens take the other 28
    assert step.tokens["prompt"] == 256


@pytest.mark.parametrize(("num_decodes", "has_room"), [(44, True), (45, True), (46, False)])
def test_a_step_within_the_tolerance_of_its_target_is_full(num_decodes: int, has_room: bool) -> None:
    latency = AffineModel(base_s=0.0, per_request_s=1e-3)
    sizes = HarnessOptions(num_blocks=200, latency=latency, max_batch_size=64)
    harness = Harness("fcfs", "round_robin", dynamic(tolerance_fraction=0.09999), sizes)
    for index in range(num_decodes):
        harness.submit(f"d{index}", 1, 50)
    for _ in range(3):
        stepped(harness)
    harness.submit("prompt", 40)
    assert ("prompt" in stepped(harness).tokens) is has_room


def test_a_lone_prompt_gets_the_least_chunk_when_even_that_takes_too_long() -> None:
    harness = Harness("fcfs", "round_robin", dynamic(target_batch_time_s=0.001, min_chunk=64))
    harness.submit("a", 200)
    harness.submit("b", 10)
    assert [step.tokens for step in harness.steps_until_idle()] == [
        {"a": 64},
        {"a": 64},
        {"a": 64},
        {"a": 8},
        {"b": 10},
    ]


def test_lone_chunks_are_those_that_a_lone_prompt_gets() -> None:
    latency = AffineModel(base_s=0.01, per_token_s=1e-5, per_prefill_pair_s=1e-8)
    sizes = HarnessOptions(num_blocks=3000, latency=latency, check_conservation=False)
    harness = Harness("fcfs", "round_robin", dynamic(), sizes)
    harness.submit("long", 40_003)
    steps = harness.steps_until_idle()
    policy = harness.replica_schedulers[0]
    assert isinstance(policy, ReplicaScheduler)
    assert isinstance(policy, ChunksSoloPrompts)
    for step in steps:
        done = step.entries[0].num_computed_before
        assert policy.solo_chunk_size(done, 40_003 - done) == step.num_tokens
    predicted_s = harness.context.prefill_time.total_s(40_003)
    assert predicted_s == pytest.approx(sum(step.duration_s for step in steps), rel=0.01)


def test_chunks_end_at_the_boundary_of_a_kv_parallel_group() -> None:
    sizes = HarnessOptions(num_blocks=30, kv_parallel_groups=3, kv_group_tokens=160)
    harness = Harness("fcfs", "round_robin", dynamic(max_chunk=96), sizes)
    harness.submit("a", 330)
    policy = harness.replica_schedulers[0]
    steps = harness.steps_until_idle()
    assert [step.num_tokens for step in steps] == [96, 64, 96, 64, 10]
    done = 0
    for step in steps:
        assert policy.solo_chunk_size(done, 330 - done) == step.num_tokens
        done += step.num_tokens


def test_what_was_searched_before_changes_no_chunk() -> None:
    latency = AffineModel(base_s=0.01, per_token_s=1e-5, per_prefill_pair_s=1e-8)

    def chunk_after(*prompts: int) -> int:
        sizes = HarnessOptions(num_blocks=3000, latency=latency, check_conservation=False)
        harness = Harness("fcfs", "round_robin", dynamic(), sizes)
        for index, tokens in enumerate(prompts):
            harness.submit(f"w{index}", tokens)
        harness.steps_until_idle()
        harness.submit("prompt", 20_000)
        return stepped(harness).num_tokens

    assert chunk_after() == chunk_after(40_000) == chunk_after(1, 33, 700) > 1900


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"target_batch_time_s": 0}, "target_batch_time_s"),
        ({"min_chunk": 40}, "min_chunk"),
        ({"max_chunk": 100}, "max_chunk"),
        ({"min_chunk": 512, "max_chunk": 256}, r"min_chunk \(512\) is above max_chunk \(256\)"),
        ({"tolerance_fraction": 1.0}, "tolerance_fraction"),
        ({"chunk_size": 512}, "chunk_size"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Harness("fcfs", "round_robin", dynamic(**params))


def test_defaults_are_those_of_the_source() -> None:
    config = DynamicChunkConfig()
    assert (config.target_batch_time_s, config.min_chunk, config.max_chunk) == (0.05, 32, 8192)
    assert config.tolerance_fraction == 0.1
    assert DynamicChunk.__doc__ is not None
