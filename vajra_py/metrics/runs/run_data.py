"""Read the files of a finished or interrupted run.

Files are read on demand, tables by column. A missing or unreadable file raises a `RunError` that names it. The files
are `manifest.json` (required) and, where a run has them, `config.yaml`, `summary.json`, `requests.parquet`,
`steps.parquet`, `tbt.parquet`, `decisions.parquet`, `admissions.jsonl.gz`, `replicas.parquet`, `transfers.parquet`,
`programs.parquet`, `emitted.parquet`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from numpy.typing import NDArray

from vajra_py.errors import Problem, RunError
from vajra_py.metrics.definitions import Window
from vajra_py.metrics.summary.summary import Summary, covering_window, summarise
from vajra_py.metrics.tables.emitted import EMITTED_FILE, emitted_table, last_by_request
from vajra_py.metrics.tables.further_columns import DRAFT_COLUMNS
from vajra_py.metrics.tables.programs import PROGRAMS_FILE, no_programs
from vajra_py.metrics.tables.replicas import REPLICAS_FILE, replicas_table
from vajra_py.metrics.tables.requests import (
    ADMISSION_COLUMNS,
    ADMISSION_TEXTS,
    PROGRAM_COLUMNS,
    REQUEST_COLUMNS,
    STATED_COLUMNS,
    TBT_COLUMNS,
    TEXT_COLUMNS,
    with_facts,
)
from vajra_py.metrics.tables.steps import STEP_COLUMNS, expand_steps
from vajra_py.metrics.tables.tier_log import is_of_tiers
from vajra_py.metrics.tables.transfers import MOVEMENT_COLUMNS, MOVEMENT_TEXTS, TRANSFERS_FILE, TransfersBuilder
from vajra_py.runtime.records.admission_log import ADMISSIONS_FILE, read_admissions
from vajra_py.runtime.records.arrow_arrays import numpy_array
from vajra_py.runtime.records.decision_reader import is_cut, read_decisions
from vajra_py.runtime.records.emitted import EmittedFigures

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

_T = TypeVar("_T")

MANIFEST_FILE = "manifest.json"
CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
REQUESTS_FILE = "requests.parquet"
STEPS_FILE = "steps.parquet"
TBT_FILE = "tbt.parquet"
DECISIONS_FILE = "decisions.parquet"


_TABLES: Mapping[str, Sequence[str]] = {
    REQUESTS_FILE: REQUEST_COLUMNS,
    STEPS_FILE: STEP_COLUMNS,
    TBT_FILE: TBT_COLUMNS,
}
_FURTHER = (*ADMISSION_COLUMNS, *MOVEMENT_COLUMNS, *DRAFT_COLUMNS)
"""Columns that the requests tables of some runs have."""
_TEXTS = (*TEXT_COLUMNS, *ADMISSION_TEXTS, *MOVEMENT_TEXTS)
_FINISHED_STATUSES = ("finished", "complete", "completed", "done", "ok", "success")


class RunData:
    """A run's folder, read on demand. `name` distinguishes the run from other runs in a comparison."""

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path)
        self._name = name

    @classmethod
    def load(cls, path: str | Path, name: str | None = None) -> RunData:
        """Open a run's folder. Raises `RunError` if it is not a run's folder or its manifest cannot be read."""
        run = cls(path, name)
        if not run.path.is_dir():
            found = "is a file" if run.path.exists() else "does not exist"
            raise _problem(run.path, f"not a run folder (it {found})", f"A folder with a {MANIFEST_FILE}")
        _ = run.manifest
        return run

    @property
    def name(self) -> str:
        """Name passed to the constructor; by default, the folder's name without the digest that a sweep appends."""
        return self._name or re.sub(r"(?<=.)-[0-9a-f]{8}$", "", self.path.resolve().name)

    @property
    def is_named_by_sweep(self) -> bool:
        """True if `name` is made of the values that a sweep wrote into the folder's name."""
        return self._name is None and self.name != self.path.resolve().name

    def renamed(self, name: str) -> RunData:
        """Return the same run under another name."""
        other = copy.copy(self)
        other._name = name
        return other

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest as it was written."""
        return _object(self._file(MANIFEST_FILE, "A run folder has one"), _read_json)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The effective configuration as plain values; empty if the folder has none."""
        path = self.path / CONFIG_FILE
        return _object(path, _read_yaml) if path.exists() else {}

    @property
    def is_finished(self) -> bool:
        """True if the manifest marks the run as finished (or has no status)."""
        status = self.manifest.get("status")
        return status is None or str(status).lower() in _FINISHED_STATUSES

    @cached_property
    def summary(self) -> Summary:
        """The run's summary; computed from the tables if the folder has none."""
        path = self.path / SUMMARY_FILE
        if not path.exists():
            return summarise(self.requests(), self.steps(), self.tbt(), ended_at=self.manifest.get("ended_at_s"))
        try:
            return Summary.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _problem(path, f"not a readable summary ({error})", "Delete it to have it computed anew") from error

    @cached_property
    def window(self) -> Window:
        """The measurement window of the summary; the whole run if the summary has none."""
        start_s, end_s = self.summary.value("window.start_s"), self.summary.value("window.end_s")
        if start_s is None or end_s is None:
            return covering_window(self.requests("arrived_at", "first_token_at", "ended_at"), self.steps())
        return Window(float(start_s), float(end_s))

    def requests(self, *columns: str) -> ArrowTable:
        """Return the requests table, or these columns of it, one row per submitted request."""
        return self._table(REQUESTS_FILE, columns)

    def steps(self, *columns: str) -> ArrowTable:
        """Return the steps table, or these columns of it."""
        return self._table(STEPS_FILE, columns)

    def tbt(self, *columns: str) -> ArrowTable:
        """Return the table of gaps between tokens, or these columns of it."""
        return self._table(TBT_FILE, columns)

    def emitted(self) -> ArrowTable:
        """Return the values emitted by policies (`vajra_py.metrics.tables.emitted`); empty if there are none."""
        return self._optional(EMITTED_FILE, emitted_table(EmittedFigures()))

    def programs(self) -> ArrowTable:
        """Return the programs with their makespans (`vajra_py.metrics.tables.programs`); empty for a run without
        programs.
        """
        return self._optional(PROGRAMS_FILE, no_programs())

    @property
    def has_programs(self) -> bool:
        """True if any request belonged to a program."""
        return (self.path / PROGRAMS_FILE).exists()

    def replicas(self) -> ArrowTable:
        """Return the states of replicas over time (`vajra_py.metrics.tables.replicas`); empty for a run without a
        scaler.
        """
        return self._optional(REPLICAS_FILE, replicas_table())

    def transfers(self) -> ArrowTable:
        """Return the transfers table, on moves of requests between replicas (`vajra_py.metrics.tables.transfers`);
        empty for a run whose requests cannot move.
        """
        return self._optional(TRANSFERS_FILE, TransfersBuilder.schema().empty_table())

    def pool_of_replica(self) -> dict[tuple[str, int], str]:
        """Return the pool of each replica (replicaset, id); empty for a run without pools."""
        pools = (self.summary.value("pools") or {}).values()
        return {
            (one["replicaset"], one["first_replica_id"] + number): one["pool"]
            for one in pools
            for number in range(one["num_replicas"])
        }

    def _optional(self, file: str, empty: ArrowTable) -> ArrowTable:
        """Return the table in `file`, or `empty` if the run has no such file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.path / file
        if not path.exists():
            return empty
        try:
            return pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise _problem(path, f"not a readable Parquet file ({error})", "It may be cut off; run again") from error

    def requests_frame(self, *columns: str) -> pd.DataFrame:
        """Return the requests table, or these columns of it, as a pandas data frame.

        Columns `emitted.POLICY.NAME` have the last value that the policy emitted for each request under this name. If
        no columns are named, the frame has all of them. Raises `RunError` for an unknown column.
        """
        asks_for_emitted = not columns or any(name.startswith("emitted.") for name in columns)
        if not asks_for_emitted or not (self.path / EMITTED_FILE).exists():
            return _frame(self.requests(*columns))
        emitted = last_by_request(self.emitted())
        own = [name for name in columns if name not in emitted.columns]
        wanted = list(dict.fromkeys((*own, "index"))) if columns else ()
        frame = _frame(self._table(REQUESTS_FILE, wanted, beside=tuple(emitted.columns))).join(emitted, on="index")
        return frame[list(columns)] if columns else frame

    def steps_frame(self, *columns: str) -> pd.DataFrame:
        """Return the steps table as a pandas data frame."""
        return _frame(self.steps(*columns))

    def tbt_frame(self, *columns: str) -> pd.DataFrame:
        """Return the table of gaps between tokens as a pandas data frame."""
        return _frame(self.tbt(*columns))

    def measured(self, *columns: str) -> dict[str, NDArray[Any]]:
        """Return columns of the requests that arrived in the measurement window, as arrays."""
        table = self.requests(*dict.fromkeys((*columns, "arrived_at")))
        inside = self.window.holds(numpy_array(table.column("arrived_at")))
        return {name: numpy_array(table.column(name))[inside] for name in columns}

    def decisions(self) -> Iterator[Mapping[str, Any]]:
        """Yield the decision log, one row per step in order of completion. Raises `RunError` if it cannot be read.

        If the run's process was killed, the log ends with the last recorded step (`has_cut_decisions`).
        """
        import pyarrow as pa

        path = self.path / DECISIONS_FILE
        if not self.has_cut_decisions:
            path = self._file(DECISIONS_FILE, "Run again with the decision log on")
        try:
            yield from read_decisions(path)
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            raise _problem(path, f"not a readable decision log ({error})", "It may be cut off; run again") from error

    @property
    def has_admission(self) -> bool:
        """True if the requests table has columns of an admission policy."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.path / REQUESTS_FILE
        try:
            return path.exists() and "admission" in pq.read_schema(path).names
        except (OSError, pa.ArrowException) as error:
            raise _problem(path, f"not a readable table ({error})", "It may be cut off; run again") from error

    def admissions(self) -> Iterator[Mapping[str, Any]]:
        """Yield the admission policy's decisions in order (`vajra_py.runtime.records.admission_log`); nothing for a run
        without an admission policy.
        """
        path = self.path / ADMISSIONS_FILE
        try:
            yield from read_admissions(path)
        except (OSError, EOFError, ValueError) as error:
            raise _problem(path, f"not a readable log ({error})", "It may be cut off; run again") from error

    @property
    def has_decisions(self) -> bool:
        """True if the run has a decision log."""
        return (self.path / DECISIONS_FILE).exists()

    @property
    def has_cut_decisions(self) -> bool:
        """True if the decision log is incomplete because the run's process was killed."""
        return is_cut(self.path / DECISIONS_FILE)

    def _table(self, file: str, columns: Sequence[str], beside: Sequence[str] = ()) -> ArrowTable:
        """Return these columns of a table, or all; `beside` names further allowed columns for the text of an error."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        hint = f"The run's status is: {self.manifest.get('status', 'unknown')}"
        if self.has_cut_decisions:
            hint += ". It was cut off; what was decided until then: RunData.decisions()"
        path = self._file(file, hint)
        try:
            with pq.ParquetFile(path) as parquet:
                names = parquet.schema_arrow.names
                further = [name for name in _FURTHER if name in names]
                further += filter(is_of_tiers, names)
                further += [name for name in PROGRAM_COLUMNS if name in names or name in columns]
                known = [*_TABLES[file], *(further if file == REQUESTS_FILE else ())]
                unknown = [name for name in columns if name not in known]
                if unknown:
                    raise _problem(
                        path, f"no such column ({', '.join(unknown)})", f"Allowed: {', '.join((*known, *beside))}"
                    )
                if file == STEPS_FILE and "num_steps" in parquet.schema_arrow.names:
                    return _expanded(path, parquet.read(), columns or STEP_COLUMNS)
                wanted = list(columns or known)
                there = [name for name in wanted if name in parquet.schema_arrow.names]
                missing = [name for name in wanted if name not in (*there, *STATED_COLUMNS)]
                if missing:
                    raise _problem(path, f"lacks columns ({', '.join(missing)})", "It was written by another version")
                table = parquet.read(columns=there) if there else parquet.read()
                return _checked(path, with_facts(table, wanted) if there != wanted else table)
        except (OSError, pa.ArrowException) as error:
            raise _problem(path, f"not a readable Parquet file ({error})", "It may be cut off; run again") from error

    def _file(self, name: str, hint: str) -> Path:
        path = self.path / name
        if not path.exists():
            raise _problem(path, "the file is missing", hint)
        return path


def _object(path: Path, read: Callable[[Path], Any]) -> Mapping[str, Any]:
    try:
        value = read(path)
    except (OSError, ValueError) as error:
        raise _problem(path, f"cannot be read ({' '.join(str(error).split())})", None) from error
    if not isinstance(value, dict):
        raise _problem(path, f"not a mapping of names to values ({type(value).__name__})", None)
    return value


def _expanded(path: Path, records: ArrowTable, names: Sequence[str]) -> ArrowTable:
    try:
        return expand_steps(records, names)
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error).strip("'")
        raise _problem(path, f"not a table of steps ({reason})", "It was written by another version") from error


def _checked(path: Path, table: ArrowTable) -> ArrowTable:
    """Return the table after checking that columns of text hold text and columns of numbers hold numbers."""
    import pyarrow.types as kinds

    for field in table.schema:
        is_text = kinds.is_string(field.type) or kinds.is_large_string(field.type) or kinds.is_dictionary(field.type)
        if is_text != (field.name in _TEXTS) and not kinds.is_null(field.type):
            wanted = "texts" if field.name in _TEXTS else "numbers"
            raise _problem(path, f"column {field.name} holds {field.type}, not {wanted}", "It was changed; run again")
    return table


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _read_yaml(path: Path) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except YAMLError as error:
        raise ValueError(str(error)) from error


def _frame(table: ArrowTable) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _problem(path: Path, message: str, allowed: str | None) -> RunError:
    return RunError(str(Problem(str(path), message, allowed)))
