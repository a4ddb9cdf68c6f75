"""Step durations of a recorded run, replayed.

With recorded durations instead of predictions, a simulation makes the decisions of the recorded run. This is the
strongest check that the simulation and the recorded run use the same scheduler. Each replica's durations are returned
in order, once each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vajra_py.contract.latency import BatchFeatures, ModelDescription
from vajra_py.errors import ConfigError, ExecutorError, Problem
from vajra_py.latency.models.packed_times import RECORD_COLUMNS, steps_of_records
from vajra_py.latency.models.tabular import check_names, read_columns

COLUMNS = ("replica_id", "step_index", "duration_s")


class RecordedDurations:
    """Durations of each replica's steps, in order."""

    def __init__(self, durations_s: Mapping[int, Sequence[float]], *, source: str = "recorded durations") -> None:
        problems = [
            Problem(f"{source} replica {replica_id} step {index}", f"is not a duration in seconds ({duration!r})")
            for replica_id, steps in durations_s.items()
            for index, duration in enumerate(steps)
            if not (isfinite(duration) and duration >= 0)
        ]
        if problems:
            raise ConfigError(problems)
        self._durations = {int(replica_id): tuple(map(float, steps)) for replica_id, steps in durations_s.items()}
        self._next = dict.fromkeys(self._durations, 0)
        self._source = source

    @classmethod
    def from_steps_table(cls, path: str | Path) -> RecordedDurations:
        """Return the durations in a run's steps table: a Parquet, CSV or JSON file with the columns replica_id,
        step_index and duration_s.

        A Parquet file may also have step records (see `packed_times`), as written by experiments.

        Raises:
            ConfigError: the file is unreadable or lacks a column, or a replica's step indices are not consecutive from
                0.
        """
        columns = _of_records(Path(path)) or read_columns(Path(path), COLUMNS)
        return cls(_by_replica(zip(*(columns[name] for name in COLUMNS), strict=True), str(path)), source=str(path))

    def next_duration_s(self, replica_id: int, step_index: int | None = None) -> float:
        """Return the seconds of the replica's next step; `step_index`, if given, must be the index of that step.

        Raises:
            ExecutorError: the replica has no recording, its steps are used up, or the order is wrong.
        """
        steps = self._durations.get(replica_id)
        if steps is None:
            known = ", ".join(map(str, sorted(self._durations))) or "none"
            raise ExecutorError(
                f"{self._source}: has no steps of replica {replica_id}. It has those of replicas: {known}."
            )
        index = self._next[replica_id]
        if step_index is not None and step_index != index:
            raise ExecutorError(
                f"{self._source}: step {step_index} of replica {replica_id} was requested, but step {index} is next. "
                "Durations are replayed in order, each once."
            )
        if index >= len(steps):
            raise ExecutorError(
                f"{self._source}: replica {replica_id} has no step {index}; {len(steps)} were recorded. "
                "The replayed run takes more steps than the recorded one, so its decisions differ."
            )
        self._next[replica_id] = index + 1
        return steps[index]

    def restart(self) -> None:
        """Restart every replica's recording from its first step."""
        self._next = dict.fromkeys(self._durations, 0)


def _of_records(path: Path) -> Mapping[str, npt.NDArray[Any]] | None:
    """Return the columns of a Parquet file of step records; None for any other file."""
    if path.suffix != ".parquet" or not path.is_file():
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names, needed = file.schema_arrow.names, ("replica_id", *RECORD_COLUMNS)
            if "num_steps" not in names:
                return None
            check_names(path, dict.fromkeys(names), needed)
            table = file.read(needed)
    except (OSError, pa.ArrowException):
        return None  # the caller then reads it as a plain table, which reports the error
    ticks_per_second = (table.schema.metadata or {}).get(b"ticks_per_second")
    if ticks_per_second is None:
        raise ConfigError(Problem(str(path), "has step records without ticks_per_second in the file's metadata"))
    records = {name: table.column(name).combine_chunks() for name in RECORD_COLUMNS}
    records["bends"] = records["bends"].flatten()
    arrays = {name: column.to_numpy(zero_copy_only=False) for name, column in records.items()}
    step_index, duration_s = steps_of_records(arrays, int(ticks_per_second))
    replica_id = np.repeat(table.column("replica_id").to_numpy(), arrays["num_steps"])
    return dict(zip(COLUMNS, (replica_id, step_index, duration_s), strict=True))


def _by_replica(rows: Iterable[tuple[float, float, float]], source: str) -> dict[int, list[float]]:
    steps: dict[int, dict[int, float]] = {}
    for replica_id, step_index, duration in rows:
        of_replica = steps.setdefault(int(replica_id), {})
        if int(step_index) in of_replica:
            raise ConfigError(Problem(source, f"has step {int(step_index)} of replica {int(replica_id)} twice"))
        of_replica[int(step_index)] = float(duration)
    for replica_id, of_replica in steps.items():
        missing = next((index for index in range(len(of_replica)) if index not in of_replica), None)
        if missing is not None:
            raise ConfigError(
                Problem(
                    source, f"lacks step {missing} of replica {replica_id}", "Steps are numbered from 0 without gaps"
                )
            )
    return {
        replica_id: [of_replica[index] for index in range(len(of_replica))] for replica_id, of_replica in steps.items()
    }


class RecordedModel:
    """Latency model that returns recorded durations to a simulator and makes no predictions.

    Policies that need predictions require the setting `backend.simulator.predictions`. To replay a run decision for
    decision, that setting must name the latency model that the recorded run's policies used.
    """

    num_stages = 1

    def __init__(self, durations: RecordedDurations) -> None:
        self.durations = durations

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Raise `ExecutorError`, since a recording has no predictions."""
        raise ExecutorError(
            "recorded latency: a policy requested a prediction, which a recording cannot provide. "
            "Set backend.simulator.predictions to the latency model of the recorded run."
        )

    batch_time_s = stage_time_s

    def next_duration_s(self, replica_id: int, step_index: int | None = None) -> float:
        """Return the seconds of the replica's next recorded step; see `RecordedDurations`."""
        return self.durations.next_duration_s(replica_id, step_index)

    def restart(self) -> None:
        """Restart every replica's recording from its first step."""
        self.durations.restart()

    def describe(self) -> ModelDescription:
        """Describe the recording; see `DescribesModel`."""
        return ModelDescription("recorded", "durations of an earlier run")
