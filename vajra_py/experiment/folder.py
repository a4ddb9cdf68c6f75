"""The folder of a run: its files after success, failure or interruption.

`manifest.json` holds the facts that decide the results and the run's status; `environment.json` holds machine and time,
so that everything else is equal to the byte for equal settings, seed and versions.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from vajra_py.config import ExperimentConfig, dump_effective, run_manifest
from vajra_py.errors import ConfigError, Problem
from vajra_py.plugins import Registry

RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"


def config_digest(config: ExperimentConfig) -> str:
    """Names what an experiment's settings say; where results are written does not count."""
    settings = config.model_dump(
        mode="json", by_alias=True, exclude={"output", "sweep", "name", "replications", "description"}
    )
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def find_runs(path: Path) -> list[Path]:
    """The run folders at a path: itself, or those below it, in order of their names."""
    if (path / "manifest.json").exists() or not path.is_dir():
        return [path]
    found = sorted(manifest.parent for manifest in path.rglob("manifest.json"))
    return found or [path]


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_finished(self, config: ExperimentConfig) -> bool:
        """Whether it holds the complete results of just these settings."""
        manifest = self._manifest()
        return manifest.get("status") == FINISHED and manifest.get("config_digest") == config_digest(config)

    def holds_other_results(self, config: ExperimentConfig) -> bool:
        """Whether something else than a run of these settings lies there."""
        if not self.path.exists() or not any(self.path.iterdir()):
            return False
        return self._manifest().get("config_digest") != config_digest(config)

    def check(self, config: ExperimentConfig, *, overwrite: bool) -> None:
        """Raises `ConfigError` when other results lie there and `overwrite` was not asked for."""
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
        self._facts = {**manifest, "config_digest": config_digest(config)}
        self._write_json("environment.json", environment)
        (self.path / "config.yaml").write_text(dump_effective(config))
        self.note(RUNNING)

    def note(self, status: str, **facts: Any) -> None:
        """Write the run's status (and more facts) into its manifest."""
        self._facts.update(facts)
        self._write_json("manifest.json", {**self._facts, "status": status})

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
