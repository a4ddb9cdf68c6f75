"""The folder of a run: its files after success, failure or interruption.

`manifest.json` holds the facts that decide the results and the run's status; `environment.json` holds machine and time,
so that everything else is equal to the byte for equal settings, seed and versions.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vajra_py.config import ExperimentConfig, dump_effective, run_manifest
from vajra_py.errors import ConfigError, Problem
from vajra_py.plugins import Registry

RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"


def config_digest(config: ExperimentConfig) -> str:
    """Names what an experiment's settings say; where results are written and what else is asked does not count."""
    settings = config.model_dump(
        mode="json", by_alias=True, exclude={"output", "sweep", "name", "replications", "description", "capacity"}
    )
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def files_digest(config: ExperimentConfig) -> dict[str, str]:
    """The contents of the files that an experiment's settings name (traces, profiles), by path, as digests."""
    found: dict[str, str] = {}
    for name in named_paths(config):
        try:
            with Path(name).open("rb") as file:
                found[name] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
        except (OSError, ValueError):  # no file: a folder, or a word with a dot in it
            continue
    return found


def named_paths(config: ExperimentConfig) -> list[str]:
    """The strings among an experiment's settings that may be paths of files or folders that it reads, sorted."""
    settings = config.model_dump(
        mode="json", by_alias=True, exclude={"output", "sweep", "name", "replications", "capacity"}
    )
    return sorted({name for name in _strings(settings) if "." in name or "/" in name})


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def find_runs(path: Path) -> list[Path]:
    """The run folders at a path: itself, or those below it, in order of their names."""
    if (path / "manifest.json").exists() or not path.is_dir():
        return [path]
    found = sorted(manifest.parent for manifest in path.rglob("manifest.json") if not _is_hidden(manifest, path))
    return found or [path]


def _is_hidden(manifest: Path, path: Path) -> bool:
    """Whether a run is none of its own: a part of one, or not complete yet."""
    return any(name.startswith(".") for name in manifest.relative_to(path).parts)


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_finished(self, config: ExperimentConfig) -> bool:
        """Whether it holds the complete results of just these settings and the files that they name."""
        manifest = self._manifest()
        is_same = manifest.get("config_digest") == config_digest(config) and not self._changed_files(config)
        return is_same and manifest.get("status") == FINISHED

    def holds_other_results(self, config: ExperimentConfig) -> bool:
        """Whether something else than a run of these settings lies there."""
        if not self.path.exists() or not any(self.path.iterdir()):
            return False
        return self._manifest().get("config_digest") != config_digest(config)

    def check(self, config: ExperimentConfig, *, overwrite: bool) -> None:
        """Raises `ConfigError` when other results lie there and `overwrite` was not asked for."""
        changed = [] if overwrite else self._changed_files(config)
        if changed:
            message = f"holds results from before these files changed ({', '.join(changed)})"
            raise ConfigError(Problem(f"output {self.path}", message, "Another name or folder, or overwrite it"))
        if self.holds_other_results(config) and not overwrite:
            raise ConfigError(
                Problem(
                    f"output {self.path}",
                    "holds the results of other settings",
                    "Give the experiment another name (`--set name=…`) or folder (`--set output.dir=…`), or overwrite it",
                )
            )

    def start(self, config: ExperimentConfig, registry: Registry, *, overwrite: bool, is_private: bool = False) -> None:
        """Make the folder ready for a run of these settings, for everyone or its owner only; raises like `check`."""
        self.check(config, overwrite=overwrite)
        if self.path.exists():
            shutil.rmtree(self.path)
        self.path.mkdir(0o700 if is_private else 0o777, parents=True)
        manifest = run_manifest(config, registry)
        environment = manifest.pop("environment")
        self._facts = {**manifest, "config_digest": config_digest(config), "files": files_digest(config)}
        self._write_json("environment.json", environment)
        (self.path / "config.yaml").write_text(dump_effective(config))
        self.note(RUNNING)

    def note(self, status: str, **facts: Any) -> None:
        """Write the run's status (and more facts) into its manifest."""
        self._facts.update(facts)
        self._write_json("manifest.json", {**self._facts, "status": status})

    def _changed_files(self, config: ExperimentConfig) -> list[str]:
        """Files that the settings name whose contents are not what the results were made from."""
        known = self._manifest().get("files")
        if not isinstance(known, dict):
            return []
        return [name for name, digest in files_digest(config).items() if known.get(name, digest) != digest]

    def _manifest(self) -> dict[str, Any]:
        path = self.path / "manifest.json"
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write_json(self, name: str, data: Any) -> None:
        path = self.path / name
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1, sort_keys=True, default=str) + "\n")
        partial.replace(path)
