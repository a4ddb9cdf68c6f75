"""Tables: what is appended comes out, in order, derived columns included; equal rows make equal bytes."""

from __future__ import annotations

import dataclasses
import math
from array import array
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.metrics.tables import columnar
from vajra_py.metrics.tables import requests as tables
from vajra_py.metrics.tables.request_row import RequestRow
from vajra_py.metrics.tables.requests import (
    REQUEST_COLUMNS,
    TBT_COLUMNS,
    GapList,
    RequestsBuilder,
    TbtBuilder,
    write_parquet,
)
from vajra_py.metrics.tables.steps import STEP_COLUMNS, StepRow, StepsBuilder, expand_steps
from vajra_py.runtime.support.clock import TICKS_PER_SECOND

NAN = float("nan")

ROW = RequestRow(
    request_id="r-0",
    index=0,
    replicaset="chat",
    replica_id=2,
    tenant="acme",
    slo_class="gold",
    session_id="s-1",
    priority=-1,
    num_prompt_tokens=100,
    num_output_tokens=3,
    num_cached_tokens=32,
    num_preemptions=1,
    arrived_at=1.0,
    admitted_at=1.5,
    first_token_at=3.0,
    ended_at=5.0,
    reason="stop",
    detail="",
    tbt_p50_s=0.5,
    tbt_p99_s=1.5,
    tbt_max_s=1.5,
    ttft_slo_s=2.0,
    tpot_slo_s=None,
    deadline_at=None,
)
STEP = StepRow("chat", 0, 7, 1.0, 0.02, 5, 1, 5, 256, 3000, 6, 2, 900, 0.1, 0, 1)


def requests(*rows: RequestRow) -> RequestsBuilder:
    builder = RequestsBuilder()
    for row in rows:
        builder.append(row)
    return builder


def test_a_request_comes_out_with_what_follows_from_it() -> None:
    table = requests(ROW).to_table()
    assert tuple(table.column_names) == REQUEST_COLUMNS
    row = table.to_pylist()[0]
    assert {name: row[name] for name in ("request_id", "tenant", "session_id", "replica_id", "priority")} == {
        "request_id": "r-0",
        "tenant": "acme",
        "session_id": "s-1",
        "replica_id": 2,
        "priority": -1,
    }
    assert (row["ttft_s"], row["e2e_s"], row["queue_s"], row["tpot_s"], row["slo_met"]) == (2.0, 4.0, 0.5, 1.0, True)
    assert math.isnan(row["tpot_slo_s"])


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({"ttft_slo_s": 1.9}, False),
        ({"ttft_slo_s": None}, None),
        ({"reason": "expired"}, False),
        ({"reason": "aborted"}, None),
    ],
)
def test_slo_met_is_true_false_or_open(change: dict[str, object], met: bool | None) -> None:
    assert requests(dataclasses.replace(ROW, **change)).to_table().column("slo_met").to_pylist() == [met]


def test_types_are_those_of_the_schema() -> None:
    types = {field.name: str(field.type) for field in requests(ROW).to_table().schema}
    assert types["request_id"] == types["reason"] == "string"
    assert types["index"] == types["num_output_tokens"] == "int64"
    assert (types["replica_id"], types["arrived_at"], types["slo_met"]) == ("int32", "double", "bool")


def test_requests_end_in_any_order_and_leave_by_submission() -> None:
    order = np.random.default_rng(1).permutation(50)
    rows = [dataclasses.replace(ROW, index=int(i), request_id=f"é-{i}", tenant=f"t{i % 3}") for i in order]
    table = requests(*rows).to_table()
    assert table.column("index").to_pylist() == list(range(50))
    assert table.column("request_id").to_pylist() == [f"é-{i}" for i in range(50)]
    assert table.column("tenant").to_pylist() == [f"t{i % 3}" for i in range(50)]


def test_a_request_cannot_come_twice() -> None:
    with pytest.raises(ValueError, match="index 0"):
        requests(ROW, ROW).to_table()


def test_an_unknown_reason_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'done'.*Allowed: stop"):
        requests(dataclasses.replace(ROW, reason="done"))


def test_builders_go_on_after_a_table_was_taken() -> None:
    builder = requests(ROW)
    first = builder.to_table()
    builder.append(dataclasses.replace(ROW, index=1, request_id="r-1"))
    assert (first.num_rows, builder.to_table().column("request_id").to_pylist()) == (1, ["r-0", "r-1"])


def test_steps_that_come_after_a_table_was_taken_are_in_the_next_one(tmp_path: Path) -> None:
    builder = StepsBuilder()
    builder.append(STEP)
    first = builder.to_table()
    other = StepsBuilder()
    other.append(STEP._replace(step_index=5, formed_at=STEP.formed_at + 2.0))
    builder.append(STEP._replace(step_index=4, formed_at=STEP.formed_at + 1.0))
    assert (first.num_rows, builder.to_table().num_rows) == (1, 2)
    for part in other.slices(10):
        builder.extend(part)
    assert builder.to_table().column("step_index").to_pylist() == [STEP.step_index, 4, 5]
    write_parquet(builder, tmp_path / "steps.parquet")
    assert expand_steps(pq.read_table(tmp_path / "steps.parquet"), STEP_COLUMNS).equals(builder.to_table())


def test_columns_of_steps_are_read_alone_as_together() -> None:
    builder = StepsBuilder()
    for i in range(3):
        builder.append(STEP._replace(step_index=i, formed_at=STEP.formed_at + (i * 7) % 3, num_waiting=i))
    table = builder.to_table()
    (records,) = builder.slices(10)
    for name in STEP_COLUMNS:
        assert expand_steps(records, [name]).column(name).equals(table.column(name))


def test_steps_keep_their_order() -> None:
    builder = StepsBuilder()
    builder.append(STEP)
    builder.append(STEP._replace(replicaset="code", step_index=3, decode_context_tokens=3_000_000_000))
    table = builder.to_table()
    assert tuple(table.column_names) == STEP_COLUMNS
    assert table.to_pylist()[0] == STEP._asdict()
    assert table.column("replicaset").to_pylist() == ["chat", "code"]
    assert table.column("decode_context_tokens").to_pylist() == [3000, 3_000_000_000]


def test_gaps_are_merged_and_sorted() -> None:
    builder = TbtBuilder()
    for gap_s, weight in ((0.3, 2), (0.1, 1), (0.3, 5), (0.2, 0)):
        builder.add("chat", "gold", gap_s, weight)
    builder.gaps("chat").add(0.4, 1)
    table = builder.to_table()
    assert tuple(table.column_names) == TBT_COLUMNS
    rows = [tuple(row.values()) for row in table.to_pylist()]
    assert rows == [("chat", "", 0.4, 1), ("chat", "gold", 0.1, 1), ("chat", "gold", 0.3, 7)]
    assert len(builder) == 3


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=60), st.integers(2, 12))
def test_merging_on_the_way_changes_nothing(pairs: list[tuple[int, int]], merge_rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columnar, "_MERGE_ROWS", merge_rows)
        gaps = GapList()
        for gap, weight in pairs:
            gaps.add(float(gap), weight)
        found = dict(zip(*(column.tolist() for column in gaps.merged()), strict=True))
    expected: dict[float, int] = {}
    for gap, weight in pairs:
        if weight:
            expected[float(gap)] = expected.get(float(gap), 0) + weight
    assert found == expected


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=30),
    st.lists(st.tuples(st.integers(0, 28), st.integers(2, 30)), min_size=1, max_size=20),
    st.integers(1, 6),
)
def test_gaps_of_a_shared_log_count_for_everybody_who_saw_them(
    steps: list[int], parts: list[tuple[int, int]], merge_rows: int
) -> None:
    log = array("q", np.cumsum(steps).tolist())
    expected = GapList()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columnar, "_MERGE_ROWS", merge_rows)
        gaps = GapList()
        for first, size in parts:
            end = min(first + size, len(log))
            if end - first > 1:
                gaps.extend_from_log(log, first, end)
                expected.extend(np.diff(np.array(log[first:end]) / TICKS_PER_SECOND))
            log.append(log[-1] + 1)
            gaps.add(0.5, 1)  # this may merge
            expected.add(0.5, 1)
        found = gaps.merged()
    assert [column.tolist() for column in found] == [column.tolist() for column in expected.merged()]


def test_equal_rows_make_equal_bytes(tmp_path: Path) -> None:
    def write(folder: Path) -> list[bytes]:
        folder.mkdir()
        rows = [dataclasses.replace(ROW, index=i, request_id=f"r-{i}", arrived_at=i / 7) for i in range(300)]
        builders = {"requests": requests(*rows), "steps": StepsBuilder(), "tbt": TbtBuilder()}
        for i in range(300):
            builders["steps"].append(STEP._replace(step_index=i, formed_at=i / 3))
            builders["tbt"].add("chat", "", i / 9, 3)
        for name, builder in builders.items():
            write_parquet(builder, folder / f"{name}.parquet")
        assert sorted(path.name for path in folder.iterdir()) == ["requests.parquet", "steps.parquet", "tbt.parquet"]
        return [(folder / f"{name}.parquet").read_bytes() for name in builders]

    assert write(tmp_path / "a") == write(tmp_path / "b")


def test_files_hold_the_table_in_row_groups_without_foreign_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_ROWS", 16)
    # Every value given: a missing one is NaN, which equals nothing.
    full = dataclasses.replace(ROW, tpot_slo_s=1.0, deadline_at=9.0, tbt_slo_s=1.0)
    builder = requests(*(dataclasses.replace(full, index=i, request_id=f"r-{i}") for i in reversed(range(40))))
    write_parquet(builder, tmp_path / "requests.parquet")
    with pq.ParquetFile(tmp_path / "requests.parquet") as file:
        assert file.num_row_groups == 3
        assert b"pandas" not in (file.schema_arrow.metadata or {})
        assert file.read().equals(builder.to_table())


@pytest.mark.parametrize("builder", [RequestsBuilder(), StepsBuilder(), TbtBuilder()])
def test_an_empty_table_has_its_columns(builder: RequestsBuilder | StepsBuilder | TbtBuilder, tmp_path: Path) -> None:
    write_parquet(builder, tmp_path / "empty.parquet")
    table = pq.read_table(tmp_path / "empty.parquet")
    assert (len(builder), table.num_rows) == (0, 0)
    assert table.schema.names == builder.schema().names
    assert builder.to_table().num_rows == 0
