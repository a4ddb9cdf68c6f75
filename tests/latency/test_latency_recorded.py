from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vajra_py.contract.latency import BatchFeatures
from vajra_py.errors import ConfigError, ExecutorError
from vajra_py.latency import ConstantModel, RecordedDurations, RecordedModel, ReplaysDurations
from vajra_py.latency.models.packed_times import RECORD_COLUMNS


def test_durations_come_back_in_order_per_replica() -> None:
    recorded = RecordedDurations({0: [0.1, 0.2, 0.3], 1: [0.5]})
    assert [recorded.next_duration_s(0), recorded.next_duration_s(1), recorded.next_duration_s(0)] == [0.1, 0.5, 0.2]
    recorded.restart()
    assert recorded.next_duration_s(0, step_index=0) == 0.1


def test_running_out_and_asking_out_of_order_are_errors_that_say_where() -> None:
    recorded = RecordedDurations({0: [0.1], 2: []}, source="run-7")
    with pytest.raises(ExecutorError, match=r"run-7: step 1 of replica 0 was requested, but step 0 is next"):
        recorded.next_duration_s(0, 1)
    assert recorded.next_duration_s(0) == 0.1
    with pytest.raises(ExecutorError, match=r"replica 0 has no step 1; 1 were recorded"):
        recorded.next_duration_s(0)
    with pytest.raises(ExecutorError, match=r"no steps of replica 1. It has those of replicas: 0, 2"):
        recorded.next_duration_s(1)


def test_impossible_durations_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        RecordedDurations({0: [0.1, -1.0], 1: [float("nan")]})
    assert len(caught.value.problems) == 2


def test_a_steps_table_may_lie_in_any_order_and_format(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"replica_id": [1, 0, 0], "step_index": [0, 1, 0], "duration_s": [0.3, 0.2, 0.1], "policy": ["a", "b", "c"]}
    )
    frame.to_parquet(tmp_path / "steps.parquet")
    frame.to_csv(tmp_path / "steps.csv", index=False)
    for name in ("steps.parquet", "steps.csv"):
        recorded = RecordedDurations.from_steps_table(tmp_path / name)
        assert [recorded.next_duration_s(0, i) for i in range(2)] == [0.1, 0.2]
        assert recorded.next_duration_s(1) == 0.3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replica_id,step_index\n0,0\n", "has no column 'duration_s'"),
        ("replica_id,step_index,duration_s\n0,0,0.1\n0,2,0.1\n", "lacks step 1 of replica 0"),
        ("replica_id,step_index,duration_s\n0,0,0.1\n0,0,0.1\n", "has step 0 of replica 0 twice"),
        ("replica_id,step_index,duration_s\n0,0,soon\n", r"steps\.csv:2 duration_s: is not a number \('soon'\)"),
    ],
)
def test_broken_steps_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "steps.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        RecordedDurations.from_steps_table(tmp_path / "steps.csv")


def test_broken_step_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    pq.write_table(pa.table({"replica_id": [0], "num_steps": [1]}), path)
    with pytest.raises(ConfigError, match=r"steps\.parquet: has no column 'duration'"):
        RecordedDurations.from_steps_table(path)
    pq.write_table(pa.table({name: [0] for name in ("replica_id", *RECORD_COLUMNS)}), path)
    with pytest.raises(ConfigError, match=r"steps\.parquet: has step records without ticks_per_second"):
        RecordedDurations.from_steps_table(path)


def test_the_model_replays_for_the_executor() -> None:
    model = RecordedModel(RecordedDurations({0: [0.1, 0.2]}))
    replays: ReplaysDurations = model
    assert isinstance(model, ReplaysDurations)
    assert not isinstance(ConstantModel(0.05), ReplaysDurations)
    assert replays.next_duration_s(0) == 0.1
    replays.restart()
    assert replays.next_duration_s(0, 0) == 0.1


def test_a_recording_alone_does_not_predict() -> None:
    model = RecordedModel(RecordedDurations({0: [0.1]}))
    assert model.num_stages == 1
    with pytest.raises(
        ExecutorError, match=r"Set backend\.simulator\.predictions to the latency model of the recorded run"
    ):
        model.batch_time_s(BatchFeatures(1, 1))
