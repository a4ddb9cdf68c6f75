"""Workloads of programs: graphs, prompts that grow along them, what clients state, files, and what is wrong in them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError

from vajra_py.errors import WorkloadError
from vajra_py.workload import (
    RequestSpec,
    SloClass,
    Workload,
    WorkloadConfig,
    build_workload,
    named_streams,
    read_jsonl,
    read_programs,
    write_jsonl,
)
from vajra_py.workload.resample import block_bootstrap

CONFIG: TypeAdapter[Any] = TypeAdapter(WorkloadConfig)


def constant(value: float) -> dict[str, Any]:
    return {"type": "constant", "value": value}


CHAIN = {"type": "chain", "calls": constant(4)}
FORK_JOIN = {"type": "fork_join", "rounds": constant(2), "width": constant(3)}
TREE = {"type": "tree", "depth": constant(2), "branching": constant(2)}
DAG = {"type": "dag", "calls": constant(8), "parents": {"type": "uniform", "min": 1, "max": 3}}


def drawn(*shapes: dict[str, Any], seed: int = 1, **settings: Any) -> Workload:
    mapping = {
        "type": "programs",
        "arrivals": {"type": "poisson", "rate": 1.0},
        "num_programs": 12,
        "shapes": list(shapes),
        "task_tokens": constant(100),
        "call_tokens": constant(20),
        "output_tokens": constant(10),
        "delay_s": {"type": "uniform", "min": 0.5, "max": 2.0},
        **settings,
    }
    return build_workload(CONFIG.validate_python(mapping), named_streams(seed), Path())


def by_program(workload: Workload) -> dict[str, list[RequestSpec]]:
    found: dict[str, list[RequestSpec]] = defaultdict(list)
    for one in workload:
        found[one.program_id].append(one)
    return found


@pytest.mark.parametrize(("shape", "sizes", "sinks"), [(CHAIN, 4, 1), (FORK_JOIN, 9, 1), (TREE, 7, 4), (DAG, 8, None)])
def test_each_shape_has_its_graph(shape: dict[str, Any], sizes: int, sinks: int | None) -> None:
    programs = by_program(drawn(shape))
    assert len(programs) == 12
    for calls in programs.values():
        ids = {call.request_id for call in calls}
        assert len(calls) == sizes
        assert sum(not call.parents for call in calls) == 1
        followed = {parent for call in calls for parent in call.parents}
        assert followed <= ids, "programs do not follow one another"
        assert sinks is None or len(ids - followed) == sinks
        assert all(call.parent_calls == call.parents for call in calls)
        assert {call.session_id for call in calls} == {calls[0].program_id}


def test_a_join_waits_for_the_work_of_its_round() -> None:
    calls = next(iter(by_program(drawn(FORK_JOIN)).values()))
    assert sorted(call.stage for call in calls) == ["join"] * 2 + ["plan"] + ["work"] * 6
    by_id = {call.request_id: call for call in calls}
    for call in calls:
        stages = {by_id[parent].stage for parent in call.parents}
        assert stages == {"plan": set(), "work": stages & {"plan", "join"}, "join": {"work"}}[call.stage]
        assert len(call.parents) == {"plan": 0, "work": 1, "join": 3}[call.stage]


def test_prompts_grow_by_the_answers_of_the_parents() -> None:
    systems = {"count": 1, "tokens": constant(50)}
    calls = next(iter(by_program(drawn(FORK_JOIN, system_prompts=systems)).values()))
    by_id = {call.request_id: call for call in calls}
    for call in calls:
        assert call.content is not None
        assert call.content.num_tokens == call.num_prompt_tokens
        if not call.parents:
            assert call.num_prompt_tokens == 150
            continue
        first = by_id[call.parents[0]]
        assert call.num_prompt_tokens == first.num_prompt_tokens + 10 * len(call.parents) + 20
        assert first.content is not None
        assert call.content.shared_prefix_tokens(first.content) == first.num_prompt_tokens
        assert {("out", parent) for parent in call.parents} <= {name for name, _ in call.content.segments}


def test_fresh_contexts_hold_answers_alone_and_bounded_ones_begin_anew() -> None:
    fresh = drawn(CHAIN, context="fresh")
    assert {call.num_prompt_tokens for call in fresh} == {100, 30}
    bounded = drawn(CHAIN, max_context_tokens=140)
    assert max(call.num_prompt_tokens for call in bounded) <= 140
    assert {call.num_prompt_tokens for call in bounded} == {100, 130, 20, 50}


def test_clients_state_what_they_are_told_to() -> None:
    chains, trees = drawn(CHAIN), drawn(TREE)
    for calls in by_program(chains).values():
        assert [call.is_last_call for call in calls] == [False] * 3 + [True]
        assert {call.num_program_calls for call in calls} == {None}
    for calls in by_program(trees).values():
        assert not any(call.is_last_call for call in calls)
        assert {call.num_program_calls for call in calls} == {7}
    silent = drawn(CHAIN, declares=[])
    assert all(not call.parent_calls and not call.is_last_call and call.num_program_calls is None for call in silent)
    assert silent.has_followers
    tools = drawn(CHAIN, declares=["size", "next_call"])
    for calls in by_program(tools).values():
        assert [call.num_program_calls for call in calls] == [4] * 4
        assert [call.next_call_after_s for call in calls] == [*[one.think_time_s for one in calls[1:]], None]


def test_equal_seeds_draw_equal_programs_and_one_ingredient_moves_no_other() -> None:
    assert list(drawn(DAG, CHAIN)) == list(drawn(DAG, CHAIN))
    assert list(drawn(DAG, CHAIN)) != list(drawn(DAG, CHAIN, seed=2))
    longer = drawn(DAG, CHAIN, delay_s=constant(9.0))
    assert sorted(map(len, by_program(longer).values())) == sorted(map(len, by_program(drawn(DAG, CHAIN)).values()))


def test_graphs_that_are_drawn_too_large_end_there() -> None:
    for shape in (CHAIN, FORK_JOIN, TREE, DAG):
        assert max(map(len, by_program(drawn(shape, max_calls=3)).values())) <= 3


def test_programs_stay_whole_in_merges_samples_and_classes(tmp_path: Path) -> None:
    workload = drawn(FORK_JOIN)
    merged = workload.merge(workload.renamed("other"))
    for program, calls in by_program(merged).items():
        assert len(calls) == 9
        assert all(parent.startswith(program.split("/")[0]) for call in calls for parent in call.parent_calls)
    rng = np.random.default_rng(0)
    classes = workload.with_slo_classes([SloClass("a"), SloClass("b", 1.0, {"program_slo_s": 60.0})], rng)
    for calls in by_program(classes).values():
        assert len({(call.slo_class, call.program_slo_s) for call in calls}) == 1
    file = tmp_path / "w.jsonl"
    write_jsonl(workload, file)
    assert list(read_jsonl(file)) == list(workload)
    plain = Workload.from_requests(
        [RequestSpec(str(n), float(n), 5, 5, program_id=f"p{n // 2}", parent_calls=("x",)) for n in range(20)]
    )
    sample = block_bootstrap(plain, np.random.default_rng(1), block_requests=3)
    assert all("#" in one.program_id and one.parent_calls == () for one in sample)


def test_settings_that_draw_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="shapes"):
        drawn()
    with pytest.raises(WorkloadError, match="leaves no room"):
        drawn(CHAIN, max_context_tokens=50, system_prompts={"count": 1, "tokens": constant(50)})


HEADER = "program,call,parents,delay_s,num_prompt_tokens,num_output_tokens,arrived_at,stage\n"
ROWS = "p,a,,0,10,5,1,plan\np,b,a,1,20,5,,\nq,a,,0,10,5,3,\np,c,a,2.5,20,5,,\np,d,b;c,0,60,5,,join\n"


def as_csv(file: Path) -> Path:
    file.write_text(HEADER + ROWS)
    return file


def as_jsonl(file: Path) -> Path:
    with file.open("w") as out:
        for row in records():
            out.write(json.dumps(row) + "\n")
    return file


def as_parquet(file: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(records()), file)
    return file


def records() -> list[dict[str, Any]]:
    names = HEADER.strip().split(",")
    rows = []
    for line in ROWS.splitlines():
        row: dict[str, Any] = dict(zip(names, line.split(","), strict=True))
        row["parents"] = row["parents"].split(";") if row["parents"] else []
        for name in ("delay_s", "num_prompt_tokens", "num_output_tokens", "arrived_at"):
            row[name] = float(row[name]) if row[name] else None
        rows.append(row)
    return rows


@pytest.mark.parametrize(("name", "write"), [("t.csv", as_csv), ("t.jsonl", as_jsonl), ("t.parquet", as_parquet)])
def test_files_of_each_kind_hold_programs(name: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    workload = read_programs(write(tmp_path / name), context="grow")
    calls = {one.request_id: one for one in workload}
    assert list(calls) == ["p/a", "p/b", "q/a", "p/c", "p/d"]
    assert calls["p/d"].parents == calls["p/d"].parent_calls == ("p/b", "p/c")
    assert [calls[name].think_time_s for name in ("p/b", "p/c")] == [1.0, 2.5]
    assert (calls["p/a"].arrived_at, calls["q/a"].arrived_at) == (1.0, 3.0)
    assert {one.num_program_calls for one in workload if one.program_id == "p"} == {4}
    content = calls["p/d"].content
    assert content is not None
    assert content.segments[-3:] == ((("out", "p/b"), 5), (("out", "p/c"), 5), (("text", "p/d"), 30))
    assert read_programs(tmp_path / name)[0].content is None
    assert {one.program_id for one in read_programs(tmp_path / name, num_programs=1)} == {"p"}
    late = read_programs(tmp_path / name, lambda size: np.arange(size) * 100.0)
    assert sorted(one.arrived_at for one in late if not one.parents) == [0.0, 100.0]


def test_a_recorded_prompt_not_longer_than_its_parents_begins_with_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(HEADER + "p,a,,0,10,5,1,\np,b,a,0,10,5,,\np,c,a,0,11,5,,\n")
    contents = [one.content.segments for one in read_programs(file, context="grow") if one.content is not None]
    assert contents[1:] == [((("out", "p/a"), 5), (("text", "p/b"), 5)), ((("text", "p/a"), 10), (("out", "p/a"), 1))]


@pytest.mark.parametrize(
    ("rows", "line", "text"),
    [
        ("p,a,a,0,10,5,1,", 2, "waits for itself"),
        ("p,a,b,0,10,5,1,\np,b,a,0,10,5,,", 2, r"waits for itself \('a' -> 'b' -> 'a'"),
        ("p,a,,0,10,5,1,\np,b,zz,0,10,5,,", 3, r"a call that its program does not have \('zz'\)"),
        ("p,a,,0,10,5,1,\nq,b,a,0,10,5,2,", 3, "a call that its program does not have"),
        ("p,a,b,0,10,5,1,\np,b,,0,10,5,,", 2, r"a call that comes later \('b'\)"),
        ("p,a,,0,10,5,1,\np,a,,0,10,5,1,", 3, "is there already"),
        ("a,b/c,,0,10,5,1,\na/b,c,,0,10,5,1,", 3, r"has the id of line 2 \('a/b/c'\)"),
        ("p,a,,-1,10,5,1,", 2, "delay_s is not a duration"),
        ("p,a,,soon,10,5,1,", 2, "delay_s is not a duration"),
        ("p,a,,0,10,5,,", 2, "has no start"),
        ("p,a,,0,0,5,1,", 2, "num_prompt_tokens cannot be used"),
        ("p,a,,0,10,1.5,1,", 2, "num_output_tokens cannot be used"),
        (",a,,0,10,5,1,", 2, "has no program"),
        ("p,a,,0,10", 2, "has 5 cells"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(rows: str, line: int, text: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(HEADER + rows + "\n")
    with pytest.raises(WorkloadError, match=text) as caught:
        read_programs(file)
    assert f"t.csv:{line}:" in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text("x")
    with pytest.raises(WorkloadError, match="unknown kind"):
        read_programs(file)
    broken = tmp_path / "t.parquet"
    broken.write_text("x")
    with pytest.raises(WorkloadError, match="not a readable Parquet file"):
        read_programs(broken)
    with pytest.raises(WorkloadError, match="has 2 programs"):
        read_programs(as_csv(tmp_path / "t.csv"), num_programs=3)


def test_agentic_sessions_are_programs(shared_dir: Path) -> None:
    file = shared_dir / "data" / "agentic_coding" / "sessions.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"recorded sessions absent: no file {file}")
    mapping = {"type": "agentic", "path": str(file), "arrivals": {"type": "poisson", "rate": 0.1}, "num_sessions": 5}
    closed, programs = (
        build_workload(CONFIG.validate_python({**mapping, "mode": mode}), named_streams(0), Path())
        for mode in ("closed", "programs")
    )
    assert [one.follows for one in closed] == [one.follows for one in programs]
    for calls in by_program(programs).values():
        assert [call.is_last_call for call in calls] == [False] * (len(calls) - 1) + [True]
        assert calls[0].program_id == calls[0].session_id
