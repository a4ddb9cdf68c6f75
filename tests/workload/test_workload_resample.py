"""Replications drawn from a trace: windows, blocks put together anew, thinning."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from vajra_py.errors import WorkloadError
from vajra_py.workload import (
    PromptContent,
    RequestSpec,
    Workload,
    WorkloadConfig,
    build_workload,
    named_streams,
    write_jsonl,
)
from vajra_py.workload.arrays import objects
from vajra_py.workload.resample import block_bootstrap, random_window, thin, units_of

ADAPTER: TypeAdapter[Any] = TypeAdapter(WorkloadConfig)
SEEDS = st.integers(0, 10_000)


@st.composite
def traces(draw: st.DrawFn) -> Workload:
    """Requests with sessions here and there, whose turns may follow each other."""
    size = draw(st.integers(4, 40))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 7.0]), min_size=size, max_size=size))
    gaps[1] = max(gaps[1], 0.25)
    times = np.cumsum(gaps).tolist()
    specs: list[RequestSpec] = []
    last: dict[str, str] = {}
    for i, at in enumerate(times):
        session = draw(st.sampled_from(["", "", "s1", "s2", "s3"]))
        parent = last.get(session) if session and draw(st.booleans()) else None
        specs.append(RequestSpec(f"r{i}", at, i + 1, i + 2, session_id=session, follows=parent, think_time_s=0.5))
        if session:
            last[session] = f"r{i}"
    return Workload.from_requests(specs, "trace")


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(one.num_prompt_tokens, one.num_output_tokens) for one in workload]


def unit_lengths(workload: Workload) -> list[tuple[tuple[int, int], ...]]:
    """What each unit consists of."""
    found: dict[int, list[tuple[int, int]]] = {}
    for unit, own in zip(units_of(workload.columns).tolist(), lengths(workload), strict=True):
        found.setdefault(unit, []).append(own)
    return [tuple(sorted(one)) for one in found.values()]


def assert_is_workload(workload: Workload) -> None:
    """In order, with ids of its own, each request after those that it follows: what reading it from a file checks."""
    assert list(Workload.from_requests(list(workload))) == list(workload)


@given(traces(), SEEDS, st.floats(0.1, 0.9))
def test_thinning_keeps_or_drops_units_as_a_whole(trace: Workload, seed: int, fraction: float) -> None:
    kept = thin(trace, np.random.default_rng(seed), fraction=fraction)
    assert_is_workload(kept)
    assert Counter(unit_lengths(kept)) <= Counter(unit_lengths(trace))
    at = {one.request_id: one for one in trace}
    assert all(one == at[one.request_id] for one in kept)  # with whom it follows, and when it arrives
    assert list(thin(trace, np.random.default_rng(seed), fraction=fraction)) == list(kept)


@given(traces(), SEEDS, st.booleans(), st.integers(1, 12))
def test_a_bootstrap_holds_copies_of_whole_units(trace: Workload, seed: int, by_time: bool, block: int) -> None:
    starts = trace.columns.arrived_at[np.unique(units_of(trace.columns), return_index=True)[1]]
    num_units, options = len(starts), {"block_s": block / 4} if by_time else {"block_requests": block}
    span_s = (starts[-1] - starts[0]) * num_units / max(num_units - 1, 1)
    if block / 4 >= span_s if by_time else block >= num_units:
        with pytest.raises(WorkloadError, match="a block is as long as the trace or longer"):
            block_bootstrap(trace, np.random.default_rng(seed), **options)
        return
    sample = block_bootstrap(trace, np.random.default_rng(seed), **options)
    assert_is_workload(sample)
    assert set(unit_lengths(sample)) <= set(unit_lengths(trace))
    if not by_time:
        assert len(unit_lengths(sample)) == num_units
    same = block_bootstrap(trace, np.random.default_rng(seed), **options)
    assert list(same) == list(sample)


@given(traces(), SEEDS, st.data())
def test_a_window_is_a_stretch_of_the_trace(trace: Workload, seed: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(trace) - 1))
    window = random_window(trace, np.random.default_rng(seed), num_requests=size)
    assert_is_workload(window)
    skip = window.source["operations"][-1]["skip"]
    assert lengths(window) == lengths(trace)[skip : skip + size]
    gaps = np.diff(window.columns.arrived_at)
    np.testing.assert_allclose(gaps, np.diff(trace.columns.arrived_at[skip : skip + size]), atol=1e-9)
    assert window.columns.arrived_at[0] == 0.0


def poisson(size: int, rate: float = 5.0, seed: int = 0) -> Workload:
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, size))
    return Workload.from_requests([RequestSpec(f"r{i}", at, i + 1, 1) for i, at in enumerate(times.tolist())])


@pytest.mark.parametrize(
    "draw",
    [
        lambda trace, rng: random_window(trace, rng, num_requests=100),
        lambda trace, rng: random_window(trace, rng, duration_s=20),
        lambda trace, rng: block_bootstrap(trace, rng, block_s=3),
        lambda trace, rng: block_bootstrap(trace, rng, block_requests=20),
        lambda trace, rng: thin(trace, rng, rate=2.0),
    ],
)
def test_seeds_differ_and_vary_about_the_trace(draw: Any) -> None:
    trace = poisson(1000)
    samples = [draw(trace, np.random.default_rng(seed)) for seed in range(40)]
    assert len({tuple(lengths(one)) for one in samples}) >= 35  # two windows may begin at one request
    wanted = 2.0 if samples[0].source["operations"][-1]["op"] == "thin" else trace.rate
    gaps = [1 / one.rate for one in samples]
    error = np.std(gaps) / np.sqrt(len(gaps))
    assert np.std(gaps) > 0.005 / wanted
    assert np.mean(gaps) == pytest.approx(1 / wanted, abs=4 * error)


def test_every_request_of_a_trace_is_equally_likely_in_its_bootstrap() -> None:
    trace = poisson(50)
    for options in ({"block_s": 1.5}, {"block_requests": 7}):
        counts = Counter(
            one.num_prompt_tokens
            for seed in range(600)
            for one in block_bootstrap(trace, np.random.default_rng(seed), **options)  # type: ignore[arg-type]
        )
        drawn = np.array([counts[i + 1] for i in range(50)])
        assert drawn.sum() == pytest.approx(600 * 50, rel=0.03)
        assert drawn.min() > 0.75 * 600
        assert drawn.max() < 1.25 * 600


def shared_prefixes(session: str = "") -> Workload:
    contents = [PromptContent((("system", 4), (f"own{i}", 4))) for i in range(6)]
    return Workload.from_requests(
        [RequestSpec(f"r{i}", float(i), 8, 2, content=one, session_id=session) for i, one in enumerate(contents)]
    )


@pytest.mark.parametrize("declares_parents", [True, False])
def test_calls_in_a_bootstrap_state_the_parents_of_their_own_copy(declares_parents: bool) -> None:
    calls: list[RequestSpec] = []
    for number in range(4):
        first, program = f"a{number}", f"p{number}"
        calls.append(RequestSpec(first, 10.0 * number, 10, 5, program_id=program))
        calls.append(RequestSpec(f"b{number}", 10.0 * number + 1, 10, 5, program_id=program, follows=first))
    workload = Workload.from_requests(calls)
    if not declares_parents:
        workload = Workload(workload.columns.stating({"parent_calls": objects([()] * len(calls))}), "w")
    sample = block_bootstrap(workload, np.random.default_rng(1), block_requests=1)
    children = [one for one in sample if one.follows is not None]
    assert len(children) == 4
    assert all(one.parent_calls == (one.parents if declares_parents else ()) for one in children)


def test_what_would_change_how_prefixes_are_found_is_refused() -> None:
    rng = np.random.default_rng(1)
    with pytest.raises(WorkloadError, match=r"thin: prompts share prefixes.*Allowed: window: random|window: random"):
        thin(shared_prefixes(), rng, fraction=0.5)
    with pytest.raises(WorkloadError, match="bootstrap: prompts share prefixes"):
        block_bootstrap(shared_prefixes("s"), rng, block_s=2)
    assert len(random_window(shared_prefixes(), rng, num_requests=3)) == 3
    assert len(thin(shared_prefixes("s"), rng, fraction=0.5)) in (0, 6)  # one session


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": "random"}, r"window: random needs one length \(got first: null, window_s: null\)"),
        ({"window": "random", "first": 5, "window_s": 2}, r"needs one length \(got first: 5, window_s: 2"),
        ({"window_s": 2}, "window_s is the length of a window, but window is missing"),
        ({"window": "first", "first": 2}, "'random'"),
        ({"window": "random", "first": 5, "bootstrap": {"block_s": 1}}, "window and bootstrap both"),
        ({"bootstrap": {}}, "needs either block_s or block_requests"),
        ({"bootstrap": {"block_s": 1, "block_requests": 2}}, "needs either block_s or block_requests"),
        ({"bootstrap": {"block_s": 0}}, "greater than 0"),
        ({"thin": {"rate": 2, "fraction": 0.5}}, "needs either rate or fraction"),
        ({"thin": {"fraction": 1}}, "less than 1"),
        ({"thin": {"rate": 1}, "rate": 2}, "thin and rate both set the pace"),
    ],
)
def test_options_that_say_nothing_or_two_things_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ADAPTER.validate_python({"type": "csv", "path": "a.csv"} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": "random", "first": 300}, r"300 of 300 requests.*first below 300"),
        ({"window": "random", "window_s": 1e6}, r"1e\+06 s of .* window_s below"),
        ({"thin": {"rate": 50}}, r"not below the trace's own rate \(50 and 4"),
        ({"bootstrap": {"block_s": 1e6}}, r"a block is as long as the trace or longer \(1e\+06 s of"),
        ({"bootstrap": {"block_requests": 300}}, r"a block is as long as the trace or longer \(300 of 300"),
    ],
)
def test_what_a_trace_cannot_give_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        from_file(tmp_path, options)


def from_file(folder: Path, options: dict[str, Any], seed: int = 1, trace: Workload | None = None) -> Workload:
    write_jsonl(poisson(300) if trace is None else trace, folder / "trace.jsonl")
    config = ADAPTER.validate_python({"type": "jsonl", "path": "trace.jsonl"} | options)
    return build_workload(config, named_streams(seed), folder)


def test_closed_sessions_have_no_rate_to_thin_to(tmp_path: Path) -> None:
    specs = [RequestSpec("a", 0.0, 1, 1), RequestSpec("b", 1.0, 1, 1, follows="a"), RequestSpec("c", 2.0, 1, 1)]
    with pytest.raises(WorkloadError, match=r"thin\.rate: requests follow one another.*thin\.fraction"):
        from_file(tmp_path, {"thin": {"rate": 0.1}}, trace=Workload.from_requests(specs))


def test_the_same_seed_has_the_same_window_at_every_rate(tmp_path: Path) -> None:
    slow, fast = (from_file(tmp_path, {"window": "random", "first": 50, "rate": rate}, seed=3) for rate in (2, 8))
    assert lengths(slow) == lengths(fast)
    np.testing.assert_allclose(slow.columns.arrived_at, 4 * fast.columns.arrived_at)


@pytest.mark.parametrize("options", [{"window": "random", "first": 60}, {"bootstrap": {"block_s": 4}, "first": 60}])
def test_a_rate_is_that_of_the_trace_and_samples_vary_about_it(tmp_path: Path, options: dict[str, Any]) -> None:
    rates = [from_file(tmp_path, options | {"rate": 10}, seed).rate for seed in range(30)]
    assert np.std(rates) > 0.3
    assert 1 / np.mean(1 / np.array(rates)) == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("options", [{"thin": {"fraction": 0.3}}, {"window": "random", "window_s": 20.0}])
def test_a_merge_with_a_sampled_part_has_the_rate_that_is_set(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = "num_prompt_tokens,num_output_tokens\n" + "10,10\n" * 400
    (tmp_path / "lengths.csv").write_text(rows)
    part = {"type": "lengths", "path": "lengths.csv", "arrivals": {"type": "poisson", "rate": 10.0}}
    config = ADAPTER.validate_python({"type": "merge", "rate": 5.0, "workloads": [part | options]})
    assert build_workload(config, named_streams(1), tmp_path).rate == pytest.approx(5.0)


def test_options_come_one_after_the_other(tmp_path: Path) -> None:
    found = from_file(
        tmp_path, {"skip": 100, "bootstrap": {"block_requests": 10}, "thin": {"fraction": 0.5}, "first": 40}
    )
    assert len(found) == 40
    assert min(one.num_prompt_tokens for one in found) > 100
    assert [one["op"] for one in found.source["operations"]] == ["slice", "bootstrap", "thin", "slice"]
    assert set(found.source["streams"]) == {"bootstrap", "thin"}


def test_parts_of_a_merged_workload_are_sampled_by_streams_of_their_own(tmp_path: Path) -> None:
    write_jsonl(poisson(300), tmp_path / "trace.jsonl")
    part = {"type": "jsonl", "path": "trace.jsonl", "window": "random", "first": 20}
    config = ADAPTER.validate_python({"type": "merge", "workloads": [part | {"name": "a"}, part | {"name": "b"}]})
    merged = build_workload(config, named_streams(1), tmp_path)
    halves = [[one.num_prompt_tokens for one in merged if one.request_id[0] == name] for name in "ab"]
    assert [len(one) for one in halves] == [20, 20]
    assert halves[0] != halves[1]
