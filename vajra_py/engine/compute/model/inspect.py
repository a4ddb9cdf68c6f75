"""Check a model directory by its file headers, before any tensor library is loaded.

Invariants:
    - Every problem is reported in one line that names the file.
    - A model's own code is never run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vajra_py.errors import ConfigError, Problem

_HEADER_LIMIT = 100 << 20
_EXPECTED = "A model is a directory with config.json and *.safetensors; `vajra model tiny DIR` writes a small one"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model directory.

    Attributes:
        directory: path of the directory.
        model_type: transformers' name of the architecture.
        config: parsed content of config.json.
        weight_files: safetensors files, sorted by name; empty with random weights.
        num_elements: number of elements of all tensors in the weight files.
    """

    directory: Path
    model_type: str
    config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    num_elements: int


def inspect_model(directory: str | Path, random_weights: bool = False) -> ModelFiles:
    """Check a model directory and describe it.

    Raises:
        ConfigError: the directory is missing, incomplete or corrupt.
    """
    folder = Path(directory).expanduser()
    config = read_model_config(folder)
    _refuse_quantized(folder / "config.json", config)
    if random_weights:
        return ModelFiles(folder, config["model_type"], config, (), 0)
    files = _weight_files(folder)
    num_elements = sum(_count_elements(file) for file in files)
    return ModelFiles(folder, config["model_type"], config, files, num_elements)


def free_host_bytes() -> int:
    """Return the available memory of this machine in bytes (within a container's limit)."""
    candidates = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        candidates += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
        if limit != "max":
            candidates.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        pass
    if not candidates:
        raise ConfigError(
            Problem("/proc/meminfo", "free memory cannot be read", "Give the number of KV blocks instead")
        )
    return min(candidates)


def readable_bytes(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit: 1536 -> '1.5 KiB'."""
    unit = min(4, int(math.log(max(num_bytes, 1), 1024)))
    return f"{num_bytes / 1024**unit:.{0 if unit == 0 else 1}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def read_model_config(directory: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a model directory. Raises `ConfigError`."""
    folder = Path(directory).expanduser()
    if not folder.is_dir():
        what = "this is a file" if folder.exists() else "there is no such directory"
        raise ConfigError(Problem(f"model {folder}", what, _EXPECTED))
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(Problem(f"model {folder}", "config.json is missing", _EXPECTED))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(str(file), f"this is not readable JSON ({error})", _EXPECTED)) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(
            Problem(str(file), "`model_type` is missing", "It names the architecture, as transformers writes it")
        )
    return config


def _refuse_quantized(file: Path, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for quantized weights, which this engine does not support."""
    for name in ("quantization_config", "compression_config"):
        quantization = config.get(name)
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            message = f"the weights are quantized ({name}: {method or 'of an unnamed method'})"
            raise ConfigError(Problem(str(file), message, "Allowed: weights in float32, float16 or bfloat16"))


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                Problem(str(index), f"this is not an index of weight files ({error})", _EXPECTED)
            ) from error
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ConfigError(
                Problem(
                    str(index), f"weight files it lists are missing ({', '.join(absent)})", "Copy the directory again"
                )
            )
        return tuple(folder / name for name in names)
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.gguf") for file in folder.glob(pattern))
        found = f"weights are in other formats ({', '.join(others[:3])})" if others else "there are no weights"
        raise ConfigError(Problem(f"model {folder}", found, _EXPECTED))
    return files


def _count_elements(file: Path) -> int:
    """Return the number of elements of all tensors of a safetensors file."""
    return sum(map(math.prod, read_tensor_shapes(file).values()))


def read_tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a safetensors file by name.

    Raises `ConfigError` if the header is broken or does not match the file's size.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"the header describes {8 + length + end} bytes and the file has {size}")
        return {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(Problem(str(file), f"this weight file is corrupt ({error})", "Copy it again")) from error
