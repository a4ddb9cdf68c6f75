"""Read the operator tables of the package `aiconfigurator-core`: times of operators by size, measured inside an engine.

The layout is `data/SYSTEM/OPERATION/ENGINE/VERSION/*.parquet`, with one `SYSTEM.yaml` per GPU; times are milliseconds
of one call on one GPU. Only the package's files are read; its code is never imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vajra_py.errors import ConfigError, Problem, did_you_mean
from vajra_py.latency.operators.bundle_files import LONGEST_US, Samples

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[np.float64]

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
PACKAGE = "aiconfigurator_core"
CONVERSIONS = {"static": ("computescale_perf",), "fused": ("computescale_perf", "scale_matrix_perf")}
"""By kind of input conversion, the tables whose times are subtracted from those of 8-bit matrix products."""
LEAST_LEFT = 0.3
"""Minimum fraction of a matrix product's measured time that is left after subtracting conversions."""


@dataclass(frozen=True, slots=True)
class SystemFigures:
    """Specifications of a GPU from its system's file."""

    memory_bandwidth: float
    """Memory bandwidth that streaming kernels reach, in bytes per second."""
    kernel_latency_s: float
    memory_bytes: int


def tables_folder(given: str | None) -> Path:
    """Return the folder with `data/`: `given`, else the folder of the installed package.

    Raises:
        ConfigError: there is no such folder.
    """
    if given is not None:
        for path in (Path(given), Path(given) / "systems", Path(given) / PACKAGE / "systems"):
            if (path / "data").is_dir():
                return path
        raise ConfigError(Problem("path", f"has no folder data ({given!r})", f"Allowed: the folder {PACKAGE}/systems"))
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        message = "the package aiconfigurator-core, whose tables are read, is not installed"
        raise ConfigError(
            Problem("latency", message, "pip install 'vajra-py[aiconfigurator]', or give the folder as path")
        )
    return tables_folder(str(Path(spec.origin).parent))


def _folders(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.is_dir()) if path.is_dir() else []


def version_key(version: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts versions by their numbers."""
    parts = version.replace("rc", ".-1.").replace("post", ".").split(".")
    return tuple((int(part), "") if part.lstrip("-").isdecimal() else (0, part) for part in parts)


class OperatorTables:
    """The tables of one engine on one system.

    Raises:
        ConfigError: the system does not exist, or has no tables of this engine; the error lists the available ones.
    """

    def __init__(self, folder: Path, system: str, engine: str, version: str | None = None) -> None:
        systems = [name for name in _folders(folder / "data") if _folders(folder / "data" / name)]
        if system not in systems:
            raise ConfigError(Problem("system", f"has no tables ({system!r})", did_you_mean(system, systems)))
        self.folder = folder
        self.system, self.engine, self.version = system, engine, version
        self.root = folder / "data" / system
        engines = _folders(self.root / "gemm")
        if engine not in engines:
            raise ConfigError(
                Problem("engine", f"has no tables of {system} ({engine!r})", f"There are: {', '.join(engines)}")
            )

    @property
    def measured_in(self) -> str:
        """Engine and version in which the matrix products were measured."""
        return f"{ENGINES.get(self.engine, self.engine)} {self._version('gemm', self.engine, 'gemm_perf')}"

    def figures(self) -> SystemFigures:
        """Return the GPU's specifications.

        Raises:
            ConfigError: the system's file is missing or lacks a value.
        """
        from ruamel.yaml import YAML

        path = self.folder / f"{self.system}.yaml"
        try:
            gpu = YAML(typ="safe", pure=True).load(path.read_text("utf-8"))["gpu"]
            return SystemFigures(
                memory_bandwidth=float(gpu["mem_bw"]) * float(gpu["mem_bw_empirical_scaling_factor"]),
                kernel_latency_s=float(gpu["mem_empirical_constant_latency"]),
                memory_bytes=int(gpu["mem_capacity"]),
            )
        except (OSError, KeyError, TypeError) as error:
            raise ConfigError(Problem(str(path), f"does not describe the GPU ({error!r})")) from error

    def read(
        self,
        operation: str,
        name: str,
        columns: Sequence[str],
        engine: str | None = None,
        optional: Sequence[str] = (),
    ) -> pa.Table:
        """Return one table with these columns and `latency`, after checking its times.

        Older tables may lack the optional columns.

        Raises:
            ConfigError: the table does not exist or lacks a column, or a time is invalid.
        """
        import pyarrow.parquet as pq

        engine = engine or self.engine
        path = self.root / operation / engine / self._version(operation, engine, name) / f"{name}.parquet"
        there = set(pq.read_schema(path).names)
        missing = [column for column in (*columns, "latency") if column not in there]
        if missing:
            raise ConfigError(Problem(str(path), f"has no columns {', '.join(missing)}"))
        table = pq.read_table(path, columns=[*columns, *(one for one in optional if one in there), "latency"])
        times = table.column("latency").to_numpy()
        wrong = np.flatnonzero(~(np.isfinite(times) & (times >= 0) & (times < 10 * LONGEST_US)))
        if len(wrong):
            message = f"has an invalid time ({times[wrong[0]]} ms)"
            raise ConfigError(Problem(f"{path}: row {int(wrong[0])}", message))
        return table

    def has(self, operation: str, name: str, engine: str | None = None) -> bool:
        """Return True if any version has this table."""
        return any((self.root / operation / (engine or self.engine)).glob(f"*/{name}.parquet"))

    def _version(self, operation: str, engine: str, name: str) -> str:
        """Return the configured version if it has this operation's table, else the newest version that has it.

        If the configured version lacks the table of matrix products (`gemm`), raise `ConfigError`.
        """
        folder = self.root / operation / engine
        versions = [one for one in _folders(folder) if (folder / one / f"{name}.parquet").is_file()]
        if not versions:
            raise ConfigError(Problem("latency", f"{self.system} has no table {name} of {engine}"))
        if self.version is not None and engine == self.engine:
            if self.version in versions:
                return self.version
            if operation == "gemm":
                allowed = f"There are: {', '.join(versions)}"
                raise ConfigError(Problem("version", f"has no tables of {self.system} ({self.version!r})", allowed))
        return max(versions, key=version_key)


def column(table: pa.Table, name: str) -> Array:
    """Return a column of numbers."""
    return np.asarray(table.column(name).to_numpy(), dtype=np.float64)


def chosen(table: pa.Table, values: Mapping[str, Any], where: str) -> pa.Table:
    """Return the rows with these values, for the columns that the table has.

    Raises:
        ConfigError: no row has these values; the error lists the available values of the first column without a match.
    """
    for name, value in values.items():
        if name not in table.column_names:
            continue
        found = table.column(name).to_numpy(zero_copy_only=False)
        mask = found == value
        if not mask.any():
            there = ", ".join(map(str, sorted(set(found.tolist()), key=_by_size)))
            raise ConfigError(Problem(where, f"has no times for {name} {value}", f"There are: {there}"))
        table = table.filter(mask)
    return table


def _by_size(value: Any) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))


class GemmTimes:
    """Microseconds of matrix products of one precision, by rows (tokens) and by the matrix's output and input size.

    If several kernels were measured, the fastest one counts. Between measured matrix sizes, the time is linear in both
    sizes; beyond them it grows in proportion to the size of the matrix. Matrix products in 8 bits were measured
    together with the conversion of their input. Times of the conversion's parts, which have tables of their own, are
    subtracted: with `static` conversion, the time of the search for the scale; with `fused`, the times of all parts.
    """

    def __init__(self, tables: OperatorTables, precision: str, conversion: str = "dynamic") -> None:
        table = tables.read("gemm", "gemm_perf", ("gemm_dtype", "m", "n", "k"))
        table = chosen(table, {"gemm_dtype": precision}, f"precision: {tables.system} in {tables.engine}")
        m, n, k, times = (column(table, name) for name in ("m", "n", "k", "latency"))
        self.rows, self._outputs, self._inputs = np.unique(m), np.unique(n), np.unique(k)
        cube = np.full((len(self._outputs), len(self._inputs), len(self.rows)), np.inf)
        places = (
            np.searchsorted(self._outputs, n),
            np.searchsorted(self._inputs, k),
            np.searchsorted(self.rows, m),
        )
        np.minimum.at(cube, places, 1e3 * times)
        cube[~np.isfinite(cube)] = np.nan
        self._cube = cube
        if precision == "fp8" and conversion != "dynamic":
            for name in CONVERSIONS[conversion]:
                if tables.has("quantize", name):
                    self._take_off(tables, name, precision)

    def _take_off(self, tables: OperatorTables, name: str, precision: str) -> None:
        table = chosen(tables.read("quantize", name, ("quant_dtype", "m", "k")), {"quant_dtype": precision}, name)
        m, k, times = (column(table, one) for one in ("m", "k", "latency"))
        for j, inputs in enumerate(self._inputs):
            here = k == inputs
            if here.any():
                rows, best = fastest(m[here], times[here])
                line = np.interp(self.rows, rows, best)
                self._cube[:, j] = np.maximum(self._cube[:, j] - line, LEAST_LEFT * self._cube[:, j])

    def samples(self, outputs: float, inputs: float) -> tuple[Samples, bool]:
        """Return (times of the product with one matrix by number of tokens, True if the matrix is larger than the
        measured ones).
        """
        factor, beyond = 1.0, False
        if outputs > self._outputs[-1]:
            factor, outputs, beyond = outputs / self._outputs[-1], float(self._outputs[-1]), True
        if inputs > self._inputs[-1]:
            factor, inputs, beyond = factor * inputs / self._inputs[-1], float(self._inputs[-1]), True
        outputs, inputs = max(outputs, float(self._outputs[0])), max(inputs, float(self._inputs[0]))
        total, weight = np.zeros(len(self.rows)), 0.0
        for i, one in _neighbours(self._outputs, outputs):
            for j, other in _neighbours(self._inputs, inputs):
                curve = self._curve(i, j)
                if curve is not None:
                    size = self._outputs[i] * self._inputs[j]
                    # If a corner was not measured, the other corners are used, scaled by the size of the matrix.
                    total += one * other * curve
                    weight += one * other * size / (outputs * inputs)
        if not weight:
            message = f"has no times near a matrix of {int(inputs)} x {int(outputs)}"
            raise ConfigError(Problem("latency", message))
        return Samples(self.rows, factor / weight * total), beyond

    def _curve(self, i: int, j: int) -> Array | None:
        line = self._cube[i, j]
        known = np.isfinite(line)
        if known.sum() < 2:
            return None
        curve: Array = np.interp(self.rows, self.rows[known], line[known])
        last = int(np.flatnonzero(known)[-1])
        curve[last + 1 :] = line[last] * self.rows[last + 1 :] / self.rows[last]
        return curve


def fastest(sizes: Array, times_ms: Array) -> tuple[Array, Array]:
    """Return (sizes, microseconds of the fastest kernel at each size)."""
    knots, places = np.unique(sizes, return_inverse=True)
    best = np.full(len(knots), np.inf)
    np.minimum.at(best, places, 1e3 * times_ms)
    return knots, best


def _neighbours(knots: Array, at: float) -> list[tuple[int, float]]:
    """Return (position, interpolation weight) of each measured size next to `at`."""
    if at <= knots[0]:
        return [(0, 1.0)]
    upper = int(np.searchsorted(knots, at))
    if knots[upper] == at:
        return [(upper, 1.0)]
    share = (at - knots[upper - 1]) / (knots[upper] - knots[upper - 1])
    return [(upper - 1, 1.0 - share), (upper, share)]
