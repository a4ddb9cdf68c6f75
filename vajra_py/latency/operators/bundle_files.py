"""Read a profile bundle: the operator times of one model on one GPU, measured by layer and stored as CSV files.

The layout is `MODEL/VARIANT/meta.yaml` with one folder `tpN` per tensor-parallel degree, which contains `dense.csv`,
`per_sequence.csv`, `attention.csv` and, if they were measured, `moe.csv` and `skew.csv` (each may be gzip'd). Times are
microseconds of one call in one layer. Errors name the file and, for a wrong value, its line. An incomplete folder is an
error.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vajra_py.errors import ConfigError, Problem, did_you_mean
from vajra_py.latency.models.tabular import open_csv

Array = npt.NDArray[np.float64]

ONCE_A_STEP = ("embedding", "final_layernorm")
TWICE_A_LAYER = ("layernorm",)
ONCE_A_LAYER = ("qkv_proj", "qk_norm", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
DENSE_LAYERS = (*ONCE_A_STEP, *TWICE_A_LAYER, *ONCE_A_LAYER)
NEEDED_DENSE = ("embedding", "final_layernorm", "layernorm", "qkv_proj", "rotary_emb", "o_proj")
MLP_LAYERS = ("gate_up_proj", "act_fn", "down_proj")
"""Layers of the MLP; a bundle of a model with experts may lack them."""
SEQUENCE_LAYERS = ("lm_head", "sampler")
ATTENTION_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
LONGEST_US = 1e6
"""Upper bound of operator times: no single operator of a layer takes a second, so a larger time is in a wrong unit."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Times of one operator by size; `sizes` ascend."""

    sizes: Array
    times_us: Array


class SkewSample(NamedTuple):
    """Slowdown of one attention call by unequal decode contexts, relative to equal contexts with the same mean."""

    num_decodes: float
    prefill_chunk: float
    variation: float
    """Standard deviation of the contexts divided by their mean."""
    ratio: float
    """Time of the batch with unequal contexts divided by that of the batch with equal contexts."""
    num_long: float = 0.0
    """Number of decodes with the longer of two contexts; they come first in the batch."""
    long_over_short: float = 1.0
    prefill_context: float = 0.0
    """Number of cached tokens before the chunk."""
    mean_context: float = 0.0
    """Mean context of the decodes."""


NO_SKEW: Array = np.empty((0, len(SkewSample._fields)))


@dataclass(frozen=True, slots=True)
class Bundle:
    """Checked contents of one `tpN` folder of a bundle; times are microseconds of one call in one layer."""

    folder: Path
    model: str
    hardware: str
    gpu: str
    engine: str
    """Name and version of the engine that ran the operators."""
    variant: str
    tensor_parallel: int
    dense: dict[str, Samples]
    per_sequence: dict[str, Samples]
    attention: Array
    """Rows of (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us)."""
    experts: Array | None
    """Rows of (tokens, activated_experts, time_us); None without experts."""
    skew: Array
    """Rows of `SkewSample`; empty if no batches with unequal contexts were measured."""
    all_reduce: Samples | None = None
    """Time of one all-reduce over the tensor-parallel GPUs, by bytes; None if it is not measured but modelled by a
    link."""
    experts_cut: int = 1
    """Number of GPUs over which every measured expert was divided; 1: whole experts were measured."""


def read_bundle(path: str | Path, tensor_parallel: int = 1, *, whole_experts: bool = False) -> Bundle:
    """Return the bundle at `path` (the folder with `meta.yaml`) for one tensor-parallel degree.

    The times of experts come from that degree's `moe.csv`, measured with each expert divided over the GPUs. Without
    that file, or with `whole_experts`, they come from `tp1/moe.csv`, measured with whole experts.

    Raises:
        ConfigError: a file or column is missing, a layer is unknown, a time is not positive or in an impossible unit,
            or the degree was not measured (the error lists the measured ones).
    """
    root = Path(path)
    meta = _read_meta(root)
    folder = root / f"tp{tensor_parallel}"
    if not folder.is_dir():
        there = sorted(int(one.name[2:]) for one in root.glob("tp*") if one.is_dir() and one.name[2:].isdecimal())
        allowed = f"Measured degrees: {', '.join(map(str, there)) or 'none'}"
        raise ConfigError(Problem(str(root), f"has no times for tensor_parallel {tensor_parallel}", allowed))
    dense = _layers(folder, "dense", "tokens", DENSE_LAYERS)
    moe, experts_cut = _experts_file(root, tensor_parallel, whole=whole_experts)
    experts = None if moe is None else _table(moe, ("tokens", "activated_experts", "time_us"))
    _check_layers(folder, dense, has_experts=experts is not None)
    per_sequence = _layers(folder, "per_sequence", "sequences", SEQUENCE_LAYERS)
    missing = [name for name in SEQUENCE_LAYERS if name not in per_sequence]
    if missing:
        raise ConfigError(Problem(f"{folder}/per_sequence.csv", f"has no times of {', '.join(missing)}"))
    attention = _table(_needed(folder, "attention"), (*ATTENTION_AXES, "time_us"))
    _check_attention(folder, attention)
    skew = _file(folder, "skew", optional=True)
    return Bundle(
        folder=folder,
        model=_text(root, meta, "model"),
        hardware=_hardware(meta),
        gpu=str(meta.get("gpu", meta.get("hardware", ""))),
        engine=f"vLLM {meta['vllm_version']}" if "vllm_version" in meta else "an unnamed engine",
        variant=str(meta.get("variant", root.name)),
        tensor_parallel=tensor_parallel,
        dense=dense,
        per_sequence=per_sequence,
        attention=attention,
        experts=experts,
        skew=NO_SKEW if skew is None else _skew_samples(skew),
        experts_cut=experts_cut,
    )


def _experts_file(root: Path, tensor_parallel: int, *, whole: bool) -> tuple[Path | None, int]:
    """Return the file of experts' times (None without experts), and the number of GPUs over which each expert is
    divided.
    """
    split = _file(root / f"tp{tensor_parallel}", "moe", optional=True)
    one = _file(root / "tp1", "moe", optional=True)
    if split is None or tensor_parallel == 1 or (whole and one is not None):
        return one, 1
    if whole:
        message = f"is missing, and {split} has times of experts that are split over {tensor_parallel} GPUs each"
        raise ConfigError(Problem(f"{root}/tp1/moe.csv", message, "expert_parallel needs times of whole experts"))
    return split, tensor_parallel


def bundle_hardware(path: str | Path) -> str | None:
    """Return the hardware that the bundle at `path` states, without reading its times."""
    return _hardware(_read_meta(Path(path))) or None


def _hardware(meta: dict[str, Any]) -> str:
    return str(meta.get("hardware", meta.get("gpu", "")))


def _read_meta(root: Path) -> dict[str, Any]:
    if not root.is_dir():
        raise ConfigError(Problem(str(root), "there is no such folder", "A profile bundle is a folder with meta.yaml"))
    path = root / "meta.yaml"
    if not path.is_file():
        inside = sorted(one.parent for one in root.glob("**/meta.yaml"))
        allowed = f"Bundles below it: {', '.join(map(str, inside[:5]))}" if inside else "A profile bundle has one"
        raise ConfigError(Problem(str(path), "is missing", allowed))
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        # Only top-level entries are used; nested ones describe how the times were measured.
        lines = [line for line in path.read_text("utf-8").splitlines() if line[:1].strip(" -")]
        meta = YAML(typ="safe", pure=True).load("\n".join(lines))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ConfigError(Problem(str(path), f"cannot be read ({error})")) from error
    if not isinstance(meta, dict):
        raise ConfigError(Problem(str(path), f"is not a mapping (got {type(meta).__name__})"))
    return meta


def _text(root: Path, meta: dict[str, Any], key: str) -> str:
    value = meta.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(Problem(f"{root}/meta.yaml", f"does not say which {key} was measured (got {value!r})"))
    return value


def _file(folder: Path, stem: str, *, optional: bool = False) -> Path | None:
    for name in (f"{stem}.csv", f"{stem}.csv.gz"):
        if (folder / name).is_file():
            return folder / name
    if optional:
        return None
    there = ", ".join(sorted(one.name for one in folder.iterdir())) or "nothing"
    raise ConfigError(Problem(f"{folder}/{stem}.csv", "is missing", f"The folder has: {there}"))


def _needed(folder: Path, stem: str) -> Path:
    found = _file(folder, stem)
    assert found is not None
    return found


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, texts of these columns) for each row."""
    try:
        with open_csv(path) as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            missing = [name for name in columns if name not in header]
            if missing:
                raise ConfigError(
                    [Problem(f"{path}:1", f"has no column {name!r}", did_you_mean(name, header)) for name in missing]
                )
            places = [header.index(name) for name in columns]
            for row in reader:
                if row:
                    if len(row) <= max(places):
                        raise ConfigError(
                            Problem(f"{path}:{reader.line_num}", f"has {len(row)} of {len(header)} columns")
                        )
                    yield reader.line_num, [row[place] for place in places]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(Problem(str(path), f"cannot be read ({error})")) from error


def _number(path: Path, line: int, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(Problem(f"{path}:{line} {name}", f"is not a number ({text!r})")) from None
    if name == "time_us":
        if not isfinite(value) or value <= 0:
            raise ConfigError(Problem(f"{path}:{line} {name}", f"is not positive ({text})", "Times are microseconds"))
        if value > LONGEST_US:
            message = f"cannot be the time of one operator ({value / 1e6:g} s)"
            raise ConfigError(Problem(f"{path}:{line} {name}", message, "Times are microseconds of one layer"))
    elif not isfinite(value) or value < 0 or value != int(value):
        raise ConfigError(Problem(f"{path}:{line} {name}", f"is not a count ({text})", "Allowed: whole numbers from 0"))
    return value


def _quick_table(path: Path, columns: Sequence[str]) -> Array | None:
    """Return the numbers in these columns; None if the file has an error, which reading line by line then locates."""
    import pyarrow as arrow
    import pyarrow.csv as arrow_csv

    types = dict.fromkeys(columns, arrow.float64())
    options = arrow_csv.ConvertOptions(column_types=types, include_columns=list(columns))
    try:
        table = arrow_csv.read_csv(path, convert_options=options)
        numbers = np.column_stack([table.column(name).to_numpy() for name in columns])
    except (arrow.ArrowException, OSError, ValueError, KeyError):
        return None
    return numbers if len(numbers) and np.isfinite(numbers).all() else None


def _table(path: Path, columns: Sequence[str]) -> Array:
    quick = _quick_table(path, columns)
    if quick is not None:
        sizes, times = quick[:, :-1], quick[:, -1]
        if (
            (sizes >= 0).all()
            and (sizes == np.floor(sizes)).all()
            and (times > 0).all()
            and (times <= LONGEST_US).all()
        ):
            return quick
    rows = [
        [_number(path, line, name, text) for name, text in zip(columns, texts, strict=True)]
        for line, texts in _rows(path, columns)
    ]
    if not rows:
        raise ConfigError(Problem(str(path), "has no rows"))
    return np.array(rows, dtype=np.float64)


def _layers(folder: Path, stem: str, size: str, known: Sequence[str]) -> dict[str, Samples]:
    path = _needed(folder, stem)
    found: dict[str, dict[float, float]] = {}
    for line, (layer, size_text, time_text) in _rows(path, ("layer", size, "time_us")):
        if layer not in known:
            raise ConfigError(Problem(f"{path}:{line} layer", f"is not known ({layer!r})", did_you_mean(layer, known)))
        sizes = found.setdefault(layer, {})
        sizes[_number(path, line, size, size_text)] = _number(path, line, "time_us", time_text)
    return {
        layer: Samples(np.array(sorted(times)), np.array([times[one] for one in sorted(times)]))
        for layer, times in found.items()
    }


def _check_layers(folder: Path, dense: dict[str, Samples], *, has_experts: bool) -> None:
    needed = NEEDED_DENSE if has_experts else (*NEEDED_DENSE, *MLP_LAYERS)
    missing = [name for name in needed if name not in dense]
    if missing:
        allowed = "A model with experts has moe.csv in place of the feed-forward layers" if not has_experts else None
        raise ConfigError(Problem(f"{folder}/dense.csv", f"has no times of {', '.join(missing)}", allowed))


def _check_attention(folder: Path, attention: Array) -> None:
    chunk, decodes = attention[:, 0], attention[:, 2]
    kinds = {
        "chunks alone (n_decode 0)": ((chunk > 0) & (decodes == 0), ("prefill_chunk", "kv_prefill")),
        "decodes alone (prefill_chunk 0)": ((chunk == 0) & (decodes > 0), ("kv_decode",)),
        "chunks beside decodes": ((chunk > 0) & (decodes > 0), ("prefill_chunk", "kv_prefill", "kv_decode")),
    }
    for kind, (rows, interpolated) in kinds.items():
        if rows.sum() < 4:
            raise ConfigError(Problem(f"{folder}/attention.csv", f"has too few times of {kind} ({rows.sum()})"))
        for name in interpolated:
            sizes = np.unique(attention[rows, ATTENTION_AXES.index(name)])
            if len(sizes) < 2:
                message = f"has only one size for {kind} ({sizes[0]:g})"
                allowed = "At least two sizes; times are interpolated between them"
                raise ConfigError(Problem(f"{folder}/attention.csv {name}", message, allowed))


def _skew_samples(path: Path) -> Array:
    columns = ("n", "nb", "pc", "kp", "kvs", "kv_big", "kv_mean", "t_mean_us", "t_skew_us")
    rows = _quick_table(path, columns)
    if rows is None or not _are_skewed(rows):
        rows = np.array([_skew_row(path, line, texts) for line, texts in _rows(path, columns)], dtype=np.float64)
        rows = rows.reshape(-1, len(columns))
    total, big, chunk, behind, small, large, mean, t_mean, t_skew = rows.T
    share = big / total
    variation = (large - small) * np.sqrt(share * (1.0 - share)) / mean
    return np.column_stack([total, chunk, variation, t_skew / t_mean, big, large / small, behind, mean])


def _are_skewed(rows: Array) -> bool:
    total, big, _, _, small, _, mean, t_mean, t_skew = rows.T
    return bool(((t_mean > 0) & (t_skew > 0) & (mean > 0) & (small > 0) & (big > 0) & (big <= total)).all())


def _skew_row(path: Path, line: int, texts: Sequence[str]) -> list[float]:
    try:
        row = [float(text) for text in texts]
    except ValueError:
        raise ConfigError(Problem(f"{path}:{line}", f"has a value that is not a number ({texts})")) from None
    if not _are_skewed(np.array([row])):
        raise ConfigError(Problem(f"{path}:{line}", "has a time, mean or count that is not positive"))
    return row
