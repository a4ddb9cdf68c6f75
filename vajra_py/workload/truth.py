"""True output lengths of a workload by request id; the index is built on the first access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vajra_py.workload.columns import Columns


class TrueLengths(Mapping[str, int]):
    """Mapping from request id to true output length in tokens, for oracle predictors of output lengths."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    @cached_property
    def _by_id(self) -> dict[str, int]:
        columns = self._columns
        ids = columns.request_id.slice(0, len(columns)).tolist()
        return dict(zip(ids, columns.num_output_tokens.tolist(), strict=True))

    def __getitem__(self, request_id: str) -> int:
        return self._by_id[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._columns)
