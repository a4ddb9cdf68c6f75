"""Stretching, cutting, merging and labelling workloads."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.errors import WorkloadError
from vajra_py.workload import (
    Constant,
    Geometric,
    Poisson,
    PromptContent,
    RequestSpec,
    RngFor,
    Sessions,
    SloClass,
    SystemPrompts,
    Uniform,
    Workload,
    named_streams,
    sessions_workload,
)
from vajra_py.workload.request import follows_of


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


segment_ids = st.sampled_from([0, 1, 2, "sys", ("out", "0"), ("out", "1")])
contents = st.lists(st.tuples(segment_ids, st.integers(1, 5)), min_size=1, max_size=4).map(
    lambda segments: PromptContent(tuple(segments))
)


@st.composite
def workloads(draw: st.DrawFn, name: str = "w") -> Workload:
    """Small workloads with sessions, followers, objectives and contents."""
    times = sorted(draw(st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=12)))
    requests = []
    for index, arrived_at in enumerate(times):
        content = draw(st.none() | contents)
        parents = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        requests.append(
            RequestSpec(
                str(index),
                arrived_at,
                draw(st.integers(1, 50)) if content is None else content.num_tokens,
                draw(st.integers(1, 50)),
                max_tokens=draw(st.none() | st.integers(1, 60)),
                priority=draw(st.integers(-2, 2)),
                tenant=draw(st.sampled_from(["", "x", "y"])),
                ttft_slo_s=draw(st.none() | st.floats(0, 9)),
                session_id=draw(st.sampled_from(["", "s1", "s2"])),
                content=content,
                follows=follows_of([str(parent) for parent in parents]),
                think_time_s=draw(st.floats(0, 3)),
                metadata=draw(st.sampled_from([{}, {"k": 1.5}, {"k": "v", "n": 2}])),
            )
        )
    return Workload.from_requests(requests, name=name)


def assert_whole(workload: Workload) -> None:
    """Sorted, unique ids, predecessors first."""
    seen: set[str] = set()
    before = 0.0
    for request in workload:
        assert request.arrived_at >= before
        assert request.request_id not in seen
        assert seen.issuperset(request.parents)
        seen.add(request.request_id)
        before = request.arrived_at


@settings(max_examples=40)
@given(workloads())
def test_requests_come_back_as_they_were_given(workload: Workload) -> None:
    requests = list(workload)
    again = Workload.from_requests(requests)
    assert list(again) == requests
    assert [workload[index] for index in range(len(workload))] == requests
    assert workload[:] == requests
    assert workload[-1] == requests[-1]
    assert list(pickle.loads(pickle.dumps(workload))) == requests


def test_an_index_beyond_the_end_is_an_error(three: Workload) -> None:
    with pytest.raises(IndexError, match="request 3 of a workload of 3"):
        three[3]


@settings(max_examples=40)
@given(workloads(), st.floats(0.01, 100))
def test_scaling_time_scales_arrivals_and_thinking_and_nothing_else(workload: Workload, factor: float) -> None:
    scaled = list(workload.scale_time(factor))
    for old, new in zip(workload, scaled, strict=True):
        assert new.arrived_at == old.arrived_at * factor
        assert new.think_time_s == old.think_time_s * factor
        assert (new.request_id, new.ttft_slo_s, new.content) == (old.request_id, old.ttft_slo_s, old.content)


@given(st.lists(st.floats(0, 1e4), min_size=2, max_size=30), st.floats(0.01, 1000))
def test_the_rate_asked_for_is_the_rate_got(times: list[float], rate: float) -> None:
    times = [*times, max(times) + 1.0]
    workload = Workload.from_requests([RequestSpec(str(i), t, 1, 1) for i, t in enumerate(sorted(times))])
    scaled = workload.at_rate(rate)
    assert scaled.rate == pytest.approx(rate, rel=1e-9)
    assert scaled.statistics().iat_cv == pytest.approx(workload.statistics().iat_cv, rel=1e-6)


def test_a_rate_cannot_be_set_where_there_is_none(three: Workload) -> None:
    with pytest.raises(WorkloadError, match="no rate to change"):
        Workload.from_requests([RequestSpec("a", 1.0, 1, 1)]).at_rate(2.0)
    with pytest.raises(WorkloadError, match="requests follow one another"):
        three.at_rate(2.0)
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WorkloadError, match="finite number > 0"):
            three.scale_time(factor)


def test_times_at_the_ends_of_doubles_are_refused_or_have_no_rate() -> None:
    close = Workload.from_requests([RequestSpec("a", 0.0, 1, 1), RequestSpec("b", 5e-324, 1, 1)])
    assert close.statistics().rate == 0.0
    with pytest.raises(WorkloadError, match="no rate to change"):
        close.at_rate(2.0)
    apart = Workload.from_requests([RequestSpec("a", 0.0, 1, 1), RequestSpec("b", 1e-300, 1, 1)])
    for rate in (1e-20, 1e-320):
        with pytest.raises(WorkloadError, match="inf times as long"):
            apart.at_rate(rate)
    with pytest.raises(WorkloadError, match="times would be infinite"):
        apart.scale_time(1e300).scale_time(1e308).scale_time(1e10)
    with pytest.raises(WorkloadError, match="or all 0"):
        apart.scale_time(1e300).scale_time(1e300).at_rate(1e300)


@settings(max_examples=40)
@given(workloads(), st.floats(0, 100), st.floats(0, 100), st.integers(0, 5), st.integers(0, 9))
def test_a_slice_holds_what_its_bounds_say(workload: Workload, start: float, end: float, skip: int, first: int) -> None:
    part = workload.slice(start_s=start, end_s=end, skip=skip, first=first)
    expected = [r for r in workload if start <= r.arrived_at < end][skip:][:first]
    assert [r.request_id for r in part] == [r.request_id for r in expected]
    assert_whole(part)
    origin = expected[0].arrived_at if skip and expected else start
    for old, new in zip(expected, part, strict=True):
        assert new.arrived_at == old.arrived_at - origin
        assert new.content == old.content


def test_a_slice_without_bounds_keeps_the_clock(three: Workload) -> None:
    assert [r.arrived_at for r in three.slice(first=2)] == [1.0, 2.0]


def test_a_follower_whose_predecessor_is_cut_arrives_by_the_clock(three: Workload) -> None:
    assert three[2].follows == "a"
    assert [r.follows for r in three.slice(skip=1)] == [None, None]


def test_a_follower_follows_the_nearest_ancestor_that_is_left() -> None:
    chain = Workload.from_requests(
        [
            RequestSpec(str(i), float(i), 100 if i in (1, 2) else 1, 1, follows=str(i - 1) if i else None)
            for i in range(5)
        ]
    )
    kept = list(chain.limit_lengths(max_prompt_tokens=10))
    assert [(r.request_id, r.follows) for r in kept] == [("0", None), ("3", "0"), ("4", "3")]


def nearest_kept(workload: Workload, request: RequestSpec, kept: set[str]) -> list[str]:
    """Kept parents, and of those that are left out the nearest kept ancestors, each once."""
    by_id = {each.request_id: each for each in workload}
    found: list[str] = []
    for parent in request.parents:
        found += [parent] if parent in kept else nearest_kept(workload, by_id[parent], kept)
    return list(dict.fromkeys(found))


@settings(max_examples=60)
@given(workloads(), st.integers(1, 50))
def test_who_is_left_out_is_replaced_by_whom_it_followed(workload: Workload, longest: int) -> None:
    kept = workload.limit_lengths(max_prompt_tokens=longest)
    names = {request.request_id for request in kept}
    assert names == {request.request_id for request in workload if request.num_prompt_tokens <= longest}
    by_id = {request.request_id: request for request in workload}
    for request in kept:
        assert list(request.parents) == nearest_kept(workload, by_id[request.request_id], names)
    assert_whole(kept)


@settings(max_examples=40)
@given(workloads("x"), workloads("x"), workloads("y"))
def test_a_merge_keeps_every_request_and_mixes_no_contents(one: Workload, two: Workload, three: Workload) -> None:
    merged = one.merge(two, three)
    assert_whole(merged)
    assert len(merged) == len(one) + len(two) + len(three)
    by_id = {r.request_id: r for r in merged}
    for part, name in ((one, "x"), (two, "x#2"), (three, "y")):
        for old in part:
            new = by_id[f"{name}/{old.request_id}"]
            assert (new.arrived_at, new.num_prompt_tokens, new.num_output_tokens) == (
                old.arrived_at,
                old.num_prompt_tokens,
                old.num_output_tokens,
            )
            assert (new.tenant, new.max_tokens, new.ttft_slo_s, new.metadata) == (
                old.tenant,
                old.max_tokens,
                old.ttft_slo_s,
                old.metadata,
            )
            assert new.follows == follows_of([f"{name}/{parent}" for parent in old.parents])
            assert new.session_id == (f"{name}/{old.session_id}" if old.session_id else "")
        pairs = [(a, b) for a in part for b in part if a.content and b.content]
        for a, b in pairs:
            assert a.content is not None
            assert b.content is not None
            mine, theirs = by_id[f"{name}/{a.request_id}"].content, by_id[f"{name}/{b.request_id}"].content
            assert mine is not None
            assert theirs is not None
            assert mine.shared_prefix_tokens(theirs) == a.content.shared_prefix_tokens(b.content)
    for a in one:
        for b in two:
            mine, theirs = by_id[f"x/{a.request_id}"].content, by_id[f"x#2/{b.request_id}"].content
            assert mine is None or theirs is None or mine.shared_prefix_tokens(theirs) == 0


def test_a_merge_can_share_contents_but_never_outputs() -> None:
    content = PromptContent((("sys", 8), (("out", "0"), 4)))
    one = Workload.from_requests([RequestSpec("0", 0.0, 12, 1, content=content)], name="one")
    two = Workload.from_requests([RequestSpec("0", 0.0, 12, 1, content=content)], name="two")
    first, second = one.merge(two, share_content=True)
    assert first.content == PromptContent((("sys", 8), (("out", "one/0"), 4)))
    assert second.content is not None
    assert first.content.shared_prefix_tokens(second.content) == 8


def test_an_output_segment_still_names_the_request_after_a_merge(streams: RngFor) -> None:
    sessions = Sessions(
        turns=Constant(value=3),
        first_turn_tokens=Uniform(min=1, max=9),
        turn_tokens=Uniform(min=1, max=9),
        output_tokens=Uniform(min=1, max=9),
    )
    workload = sessions_workload(sessions, Poisson(rate=1), streams, num_sessions=3)
    merged = workload.merge(workload)
    followers = [r for r in merged if r.follows is not None]
    assert len(followers) == 12
    for request in followers:
        assert request.content is not None
        assert request.content.segments[-2][0] == ("out", request.follows)


def test_shares_are_drawn_in_proportion_and_per_session(streams: RngFor) -> None:
    sessions = Sessions(
        turns=Geometric(p=0.4),
        first_turn_tokens=Constant(value=5),
        turn_tokens=Constant(value=5),
        output_tokens=Constant(value=5),
    )
    workload = sessions_workload(sessions, Poisson(rate=1), streams, num_sessions=3000)
    labelled = workload.with_priorities({-1: 1, 4: 3}, rng(1)).with_tenants({"a": 0.5, "b": 0.5}, rng(2))
    priority: dict[str, int] = {}
    tenant: dict[str, str] = {}
    for request in labelled:
        assert priority.setdefault(request.session_id, request.priority) == request.priority
        assert tenant.setdefault(request.session_id, request.tenant) == request.tenant
    assert np.mean([p == 4 for p in priority.values()]) == pytest.approx(0.75, abs=0.03)
    assert np.mean([t == "a" for t in tenant.values()]) == pytest.approx(0.5, abs=0.03)


def test_requests_without_a_session_are_drawn_one_by_one() -> None:
    specs = [RequestSpec(str(i), 0.0, 1, 1, session_id="s" if i % 2 else "") for i in range(400)]
    labelled = Workload.from_requests(specs).with_tenants({"a": 1, "b": 1}, rng())
    assert {r.tenant for r in labelled if not r.session_id} == {"a", "b"}
    assert len({r.tenant for r in labelled if r.session_id}) == 1


def test_a_service_class_brings_its_objectives(three: Workload) -> None:
    chat = SloClass("chat", 1.0, {"ttft_slo_s": 0.5, "tpot_slo_s": 0.05, "priority": -1})
    batch = SloClass("batch", 1.0, {"deadline_s": 60.0, "expires_after_s": 30.0})
    labelled = Workload.from_requests([RequestSpec(str(i), 0.0, 1, 1, priority=8) for i in range(50)])
    classes = {r.slo_class: r for r in labelled.with_slo_classes([chat, batch], rng())}
    assert (classes["chat"].ttft_slo_s, classes["chat"].tpot_slo_s, classes["chat"].deadline_s) == (0.5, 0.05, None)
    assert (classes["batch"].deadline_s, classes["batch"].expires_after_s) == (60.0, 30.0)
    assert (classes["chat"].priority, classes["batch"].priority) == (-1, 8)
    with pytest.raises(WorkloadError, match="are invalid"):
        three.with_priorities({0: 0.0}, rng())


@settings(max_examples=40)
@given(workloads(), st.integers(1, 30), st.integers(2, 60))
def test_no_request_is_longer_than_the_limits(workload: Workload, max_prompt: int, max_total: int) -> None:
    def fits(request: RequestSpec) -> bool:
        total = request.num_prompt_tokens + request.num_output_tokens
        return request.num_prompt_tokens <= max_prompt and total <= max_total

    dropped = workload.limit_lengths(max_prompt, max_total)
    assert [r.request_id for r in dropped] == [r.request_id for r in workload if fits(r)]
    assert dropped.source["operations"][-1]["num_dropped"] == len(workload) - len(dropped)
    clipped = workload.limit_lengths(max_prompt, max_total, "clip")
    assert len(clipped) == len(workload)
    for old, new in zip(workload, clipped, strict=True):
        assert fits(new)
        assert min(new.num_prompt_tokens, new.num_output_tokens) >= 1
        assert new == old if fits(old) else new != old
        if old.content is not None and new.content is not None:
            assert new.content == old.content.first_tokens(new.num_prompt_tokens)
            assert new.content.num_tokens == new.num_prompt_tokens


def test_too_long_can_be_an_error(three: Workload) -> None:
    with pytest.raises(
        WorkloadError, match=r"1 requests are too long, the first of them 'c' \(30 prompt \+ 1000 output"
    ):
        three.limit_lengths(max_total_tokens=500, too_long="error")
    with pytest.raises(WorkloadError, match="limits leave no room"):
        three.limit_lengths(max_total_tokens=1)


def test_a_limit_of_output_leaves_the_truth(three: Workload) -> None:
    assert [(r.max_tokens, r.num_output_tokens) for r in three.with_max_tokens(8)] == [(8, 5), (8, 7), (8, 1000)]


@given(contents, contents)
def test_a_shared_prefix_is_where_tokens_agree(one: PromptContent, two: PromptContent) -> None:
    def tokens(content: PromptContent) -> list[object]:
        return [(segment_id, offset) for segment_id, length in content.segments for offset in range(length)]

    expected = 0
    for mine, theirs in zip(tokens(one), tokens(two), strict=False):
        if mine != theirs:
            break
        expected += 1
    shared = one.shared_prefix_tokens(two)
    # Equal tokens after segments of unequal length cannot occur: the longer one continues where the shorter ends.
    assert shared == two.shared_prefix_tokens(one) == expected
    assert one.span(0, shared) == two.span(0, shared)
    if shared < min(one.num_tokens, two.num_tokens):
        assert one.span(0, shared + 1) != two.span(0, shared + 1)


@given(contents, st.integers(0, 25), st.integers(0, 25))
def test_a_span_lists_its_tokens(content: PromptContent, start: int, stop: int) -> None:
    tokens = [(segment_id, offset) for segment_id, length in content.segments for offset in range(length)]
    pieces = content.span(start, stop)
    assert [(i, o + k) for i, o, n in pieces for k in range(n)] == tokens[start : max(start, stop)]


@settings(max_examples=40)
@given(workloads())
def test_the_prefix_share_is_what_an_unlimited_cache_would_hit(workload: Workload) -> None:
    seen: list[PromptContent] = []
    shared = total = 0
    for request in workload:
        total += request.num_prompt_tokens
        if request.content is None:
            continue
        shared += max((request.content.shared_prefix_tokens(other) for other in seen), default=0)
        answer = (("out", request.request_id), request.num_output_tokens)
        seen.append(PromptContent((*request.content.segments, answer)))
    statistics = workload.statistics()
    if statistics.prefix_share_fraction is None:
        assert not seen
    else:
        assert statistics.prefix_share_fraction == pytest.approx(shared / total)


def test_statistics_of_a_known_workload(three: Workload) -> None:
    statistics = three.statistics()
    assert (statistics.num_requests, statistics.num_sessions, statistics.num_tenants) == (3, 1, 1)
    assert statistics.num_followers == 1
    assert statistics.duration_s == 3.0
    assert statistics.rate == pytest.approx(2 / 3)
    assert statistics.iat_cv == pytest.approx(1 / 3)
    assert (statistics.prompt.mean, statistics.prompt.p50, statistics.prompt.max) == (80.0, 30.0, 200)
    assert statistics.total_output_tokens == 1012
    assert statistics.to_dict()["prompt"]["min"] == 10  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrived_at": -1.0}, "arrived_at is not a time"),
        ({"arrived_at": float("nan")}, "arrived_at is not a time"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens is too small"),
        ({"num_output_tokens": -5}, "num_output_tokens is too small"),
        ({"max_tokens": 0}, "max_tokens is too small"),
        ({"deadline_s": -0.5}, "deadline_s is not a duration"),
        ({"follows": "z"}, r"follows a request that is not in the workload \('z'\)"),
        ({"follows": "b"}, r"follows a request that comes later \('b'\)"),
        ({"follows": ()}, "follows an empty list of requests"),
        ({"follows": ("b", "z")}, r"follows a request that comes later \('b'\)"),
        ({"request_id": "b"}, "request_id is empty or used before"),
        ({"request_id": ""}, "request_id is empty or used before"),
        ({"content": PromptContent((("s", 9),))}, "content describes 9 tokens of a prompt of 10"),
        ({"content": PromptContent((("s", 10), ("t", 0)))}, "segment without tokens"),
        ({"prompt_token_ids": (1, 2)}, "prompt_token_ids holds 2 ids for a prompt of 10"),
    ],
)
def test_a_request_out_of_bounds_is_refused(change: dict[str, object], message: str) -> None:
    values: dict[str, object] = {"request_id": "a", "arrived_at": 0.0, "num_prompt_tokens": 10, "num_output_tokens": 1}
    with pytest.raises(WorkloadError, match=message):
        Workload.from_requests([RequestSpec(**(values | change)), RequestSpec("b", 5.0, 1, 1)])  # type: ignore[arg-type]


def test_unsorted_requests_are_refused_or_sorted() -> None:
    requests = [RequestSpec("a", 2.0, 1, 1), RequestSpec("b", 1.0, 1, 1)]
    with pytest.raises(WorkloadError, match="arrives before the request above it"):
        Workload.from_requests(requests)
    assert [r.request_id for r in Workload.from_requests(requests, sort=True)] == ["b", "a"]


def test_a_million_requests_stay_small() -> None:
    sessions = Sessions(
        turns=Constant(value=4),
        first_turn_tokens=Constant(value=100),
        turn_tokens=Constant(value=20),
        output_tokens=Constant(value=30),
        system_prompts=SystemPrompts(count=5, tokens=Constant(value=500)),
    )
    workload = sessions_workload(sessions, Poisson(rate=10), named_streams(1), num_sessions=25_000)
    columns, content = workload.columns, workload.columns.content
    assert content is not None
    arrays = [columns.arrived_at, columns.num_prompt_tokens, columns.num_output_tokens, columns.request_id.numbers]
    arrays += [columns.follows, columns.think_time_s, content.nodes, content.store.parent, content.store.space]
    arrays += [content.store.number, content.store.tokens]
    num_bytes = sum(array.nbytes for array in arrays if array is not None)
    assert num_bytes / len(workload) < 150
