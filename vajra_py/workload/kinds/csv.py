"""`type: csv`: any CSV file with a header."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field

from vajra_py.workload.cells import TimeUnit
from vajra_py.workload.file_options import TraceOptions
from vajra_py.workload.readers.csv import CsvLayout, read_csv
from vajra_py.workload.stated import CSV_FIELDS
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload

if TYPE_CHECKING:
    CsvField: TypeAlias = str
else:
    CsvField = Literal[CSV_FIELDS]


class CsvConfig(TraceOptions):
    """Any CSV file with a header. A field of requests is read from the column that `columns` names for it; otherwise
    from the column with the field's own name or with a common name for it.
    """

    type: Literal["csv"]
    columns: dict[CsvField, str] = Field({}, description="Column name of each field whose column has another name.")
    time_unit: TimeUnit = Field(
        "s", description="Unit of the arrivals; datetime: date and time, the clock then starts at the first."
    )
    metadata: tuple[str, ...] = Field((), description="Columns kept as metadata of the requests.")

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        columns = {str(key): name for key, name in self.columns.items()}
        layout = CsvLayout(columns, self.time_unit, self.metadata, sort=self.sort, drop_empty=self.drop_empty)
        return read_csv(base_dir / self.path, layout)
