"""Catalogue of the models and devices that ship with the package."""

from __future__ import annotations

import json
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from vajra_py.errors import ConfigError, Problem, did_you_mean
from vajra_py.latency.hardware.hf_config import model_from_config
from vajra_py.latency.hardware.model_spec import ModelSpec

_DEVICE_ALIASES = {
    "a100": "a100-80gb-sxm",
    "a100-80gb": "a100-80gb-sxm",
    "cpu": "cpu-epyc-7763",
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "b200": "b200-sxm",
    "rtx4090": "rtx-4090",
    "rtxpro6000": "rtx-pro-6000",
}


def model_names() -> list[str]:
    """Return the names of the shipped models, sorted."""
    return _names("models")


def load_model(name_or_path: str | Path) -> ModelSpec:
    """Return the model described by the file at this path, or by `config.json` in the folder at this path. If there is
    no such file or folder, return the shipped model with this name.

    Names may have any case; an organisation before a slash is ignored.

    Raises:
        ConfigError: the name or file does not exist, or the file describes no supported model.
    """
    text = str(name_or_path)
    shipped = {name.lower(): name for name in model_names()}
    name = shipped.get(text.lower()) or shipped.get(text.rsplit("/", 1)[-1].lower())
    path = Path(text)
    if path.is_dir():
        return _load_file(path / "config.json", path.resolve().name)
    if path.is_file():
        return _load_file(path, path.resolve().parent.name if path.name == "config.json" else path.stem)
    if name is not None:
        file = _folder("models") / f"{name}.json"
        return model_from_config(json.loads(file.read_text("utf-8")), name=name, source=file.name)
    allowed = f"{did_you_mean(text, model_names())}; or the path of a config.json or of a folder with one"
    raise ConfigError(Problem("model", f"there is no such model or file ({text!r})", allowed))


def read_json_file(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        ConfigError: the file cannot be read, or is not JSON; the error names the line.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(Problem(str(path), f"cannot be read ({error.strerror or error})")) from error
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(str(path), "is not UTF-8 text")) from error
    except json.JSONDecodeError as error:
        raise ConfigError(Problem(f"{path}:{error.lineno}", f"is not JSON ({error.msg})")) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(Problem(str(path), f"cannot be read as JSON ({error})")) from error


def _load_file(path: Path, name: str) -> ModelSpec:
    return model_from_config(read_json_file(path), name=name, source=str(path))


def device_names() -> list[str]:
    """Return the names of the shipped devices, sorted."""
    return _names("hardware")


def read_device_file(name: str) -> dict[str, Any]:
    """Return the contents of a shipped device's file.

    Raises:
        ConfigError: there is no device of that name.
    """
    canonical = device_name(name)
    contents: dict[str, Any] = json.loads((_folder("hardware") / f"{canonical}.json").read_text("utf-8"))
    return contents


def device_name(name: str) -> str:
    """Return the full name of a shipped device; accepts any case, and short names such as a100 or cpu.

    Raises:
        ConfigError: there is no device of that name.
    """
    canonical = _DEVICE_ALIASES.get(name.lower(), name.lower())
    if canonical not in device_names():
        raise ConfigError(
            Problem(
                "device", f"there is no such device ({name!r})", did_you_mean(name, [*device_names(), *_DEVICE_ALIASES])
            )
        )
    return canonical


def _folder(name: str) -> Traversable:
    return resources.files("vajra_py.latency") / name


def _names(folder: str) -> list[str]:
    return sorted(file.name.removesuffix(".json") for file in _folder(folder).iterdir() if file.name.endswith(".json"))
