"""Step time as a sum over tables of operators.

The tables are those that profiling a model layer by layer gives, in the layout of the Vidur simulator (MLSys 2024, arXiv:2405.05465):
`per_token_ops_ms.csv.gz` has one row for every number of tokens and one column for every operator, `attention_ms.npz` has decode
attention by number of requests and mean context, and prefill attention by chunk and context. Times are milliseconds of one layer; nothing
outside the layers is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vajra_py.contract.latency import BatchFeatures
from vajra_py.errors import ConfigError, ExecutorError, Problem
from vajra_py.latency.models.tabular import Columns, check_names, read_columns, read_npz

OPERATORS = (
    "attn_pre_proj",
    "attn_post_proj",
    "mlp_up_proj",
    "mlp_down_proj",
    "mlp_act",
    "attn_rope",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
)
"""Operators that are looked up at the number of tokens rounded up."""
CACHE_WRITE = "attn_kv_cache_save"
"""Looked up at the exact number of tokens."""
OPERATORS_FILE = "per_token_ops_ms.csv.gz"
ATTENTION_FILE = "attention_ms.npz"


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How the tables are read; the defaults are Vidur's for a model of 32 layers."""

    num_layers: int = 32
    token_grain: int = 8
    """Tokens are rounded up to a multiple of this for all operators but attention and the cache write."""
    context_grain: int = 64
    """Step of the context axis of the attention tables."""
    attention_overhead: float = 1.1
    """Factor on the attention of several requests over that of one with the same totals."""
    decode_context_includes_new_token: bool = True
    """Whether a decode's context counts the token that it computes, as in Vidur (not tokens in memory before the step alone)."""


class OperatorTableModel:
    """Adds up operator tables; implements `LatencyModel` and `PredictsDecodeRuns`.

    Raises:
        ConfigError: arrays or columns are missing or of the wrong shape.
    """

    num_stages = 1

    def __init__(
        self,
        operators_ms: Columns,
        attention_ms: Columns,
        options: TableOptions | None = None,
        *,
        source: str = "tables",
    ) -> None:
        self.options = options or TableOptions()
        self._source = source
        self._operators, self._cache_write = _per_token(operators_ms, source)
        self._decode, self._prefill = attention_ms["decode"], attention_ms["prefill"]
        contexts = attention_ms["kv"]
        expected = np.arange(len(contexts)) * self.options.context_grain
        if not np.array_equal(contexts, expected):
            message = f"does not run from 0 in steps of {self.options.context_grain}"
            raise ConfigError(Problem(f"{source} kv", message, "Set context_grain to the step of the tables"))
        for name, table in (("decode", self._decode), ("prefill", self._prefill)):
            if table.ndim != 2 or table.shape[1] != len(contexts):
                raise ConfigError(
                    Problem(f"{source} {name}", f"has the shape {table.shape}", f"Rows by {len(contexts)} contexts")
                )

    @classmethod
    def from_folder(cls, folder: str | Path, options: TableOptions | None = None) -> OperatorTableModel:
        """The tables of a folder with `per_token_ops_ms.csv.gz` and `attention_ms.npz`.

        Raises:
            ConfigError: a file is missing or broken.
        """
        folder = Path(folder)
        operators = folder / OPERATORS_FILE
        if not operators.is_file() and (folder / OPERATORS_FILE.removesuffix(".gz")).is_file():
            operators = folder / OPERATORS_FILE.removesuffix(".gz")
        attention = folder / ATTENTION_FILE
        missing = [Problem(str(path), "there is no such file") for path in (operators, attention) if not path.is_file()]
        if missing:
            raise ConfigError(missing)
        columns = read_columns(operators, ("num_tokens", CACHE_WRITE, *OPERATORS))
        arrays = read_npz(attention)
        check_names(attention, arrays, ("kv", "decode", "prefill"))
        return cls(columns, arrays, options, source=str(folder))

    def stage_time_s(self, shape: BatchFeatures) -> float:
        """The same as `batch_time_s`: the tables know no stages."""
        return self.batch_time_s(shape)

    def batch_time_s(self, shape: BatchFeatures) -> float:
        """Seconds of the step; 0 for an empty batch.

        Raises:
            ExecutorError: the batch has more tokens, requests or context than the tables.
        """
        num_tokens = shape.num_decodes + shape.prefill_tokens
        if not num_tokens:
            return 0.0
        layer = self._per_token_ms(num_tokens)
        if shape.num_decodes:
            layer += self._decode_ms(shape.num_decodes, shape.decode_context_tokens)
        if shape.num_prefills:
            layer += self._prefill_ms(shape)
        return 1e-3 * self.options.num_layers * layer

    def decode_run_times_s(
        self, num_decodes: int, first_context_tokens: int, num_steps: int
    ) -> npt.NDArray[np.float64]:
        """Seconds of each step of a run of decodes; see `PredictsDecodeRuns`.

        Raises:
            ExecutorError: as `batch_time_s`.
        """
        if not num_decodes:
            return np.zeros(num_steps)
        options = self.options
        contexts = first_context_tokens + num_decodes * np.arange(num_steps, dtype=np.int64)
        if options.decode_context_includes_new_token:
            contexts += num_decodes
        columns = -(-(contexts // num_decodes) // options.context_grain)
        if num_steps:
            self._check("decode", self._decode, num_decodes, int(columns[-1]))
        attention = self._decode[num_decodes - 1, columns] * (options.attention_overhead if num_decodes > 1 else 1.0)
        times: npt.NDArray[np.float64] = 1e-3 * options.num_layers * (self._per_token_ms(num_decodes) + attention)
        return times

    def _per_token_ms(self, num_tokens: int) -> float:
        grain = self.options.token_grain
        rounded = -(-num_tokens // grain) * grain
        if rounded >= len(self._operators):
            raise ExecutorError(
                f"{self._source}: a step of {num_tokens} tokens lies outside of the tables (up to {len(self._operators) - 1}). "
                "Lower the batch's token limit, or profile further."
            )
        return self._operators.item(rounded) + self._cache_write.item(num_tokens)

    def _decode_ms(self, num_decodes: int, context_tokens: int) -> float:
        options = self.options
        if options.decode_context_includes_new_token:
            context_tokens += num_decodes
        column = -(-(context_tokens // num_decodes) // options.context_grain)
        self._check("decode", self._decode, num_decodes, column)
        return self._decode.item(num_decodes - 1, column) * (options.attention_overhead if num_decodes > 1 else 1.0)

    def _prefill_ms(self, shape: BatchFeatures) -> float:
        options = self.options
        row = round(sqrt(shape.prefill_tokens_squared))
        column = -(-shape.prefill_context_rounded_tokens // options.context_grain)
        self._check("prefill", self._prefill, row, column)
        return self._prefill.item(row - 1, column) * (options.attention_overhead if shape.num_prefills > 1 else 1.0)

    def _check(self, what: str, table: npt.NDArray[np.float64], row: int, column: int) -> None:
        rows, columns = table.shape
        if row > rows or column >= columns:
            grain = self.options.context_grain
            unit = "requests" if what == "decode" else "tokens"
            raise ExecutorError(
                f"{self._source}: {what} attention of {row} {unit} over a context of {column * grain} lies outside of the tables "
                f"(up to {rows} {unit} and {(columns - 1) * grain}). Lower the batch's limits or the model's length, or profile further."
            )


def _per_token(columns: Columns, source: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Sum of the operators, and the cache write, by number of tokens; entry 0 is 0."""
    counts = columns["num_tokens"]
    if not len(counts) or not np.array_equal(counts, np.arange(1, len(counts) + 1)):
        raise ConfigError(Problem(f"{source} num_tokens", "does not count 1, 2, 3 and so on"))
    total = np.zeros(len(counts))
    for name in OPERATORS:
        total = total + columns[name]
    return np.concatenate(([0.0], total)), np.concatenate(([0.0], columns[CACHE_WRITE]))
