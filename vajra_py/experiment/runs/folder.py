"""Folder of a run: its status and files after success, failure or interruption.

`manifest.json` has the facts that determine the results, and the run's status. `environment.json` has machine and time.
All other files of a simulation are byte for byte equal for equal settings, seed and versions.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vajra_py import __version__
from vajra_py.config import SystemConfig, dump_effective, run_manifest
from vajra_py.errors import ConfigError, Problem
from vajra_py.metrics.runs.differences import natural
from vajra_py.plugins import Registry, load_registry

RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"
_FIRST_FILES = {"environment.json", "environment.partial", "config.yaml", "manifest.partial"}
"""Files written before the manifest; a folder with only these belongs to a run that was killed at its start."""
CAPACITY_FILE = "capacity.json"
"""File with the answers of a capacity search, beside the folders of its runs."""
SIMULATED = "simulated"
"""Name of the subfolder in which a measured run has its simulation. No other subfolder of a run may contain a run."""


def config_digest(config: SystemConfig) -> str:
    """Return a digest of an experiment's settings, except those that do not determine a run's results: `output`,
    `name`, `description`, `sweep`, `replications` and `capacity`.
    """
    settings = config.model_dump(
        mode="json", by_alias=True, exclude={"output", "sweep", "name", "replications", "description", "capacity"}
    )
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def files_digest(config: SystemConfig) -> dict[str, str]:
    """Return digests of the files that an experiment's settings name (traces, profiles), by path."""
    found: dict[str, str] = {}
    for name in named_paths(config):
        try:
            with Path(name).open("rb") as file:
                found[name] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
        except (OSError, ValueError):  # the string names no file: it names a folder, or merely contains a dot
            continue
    return found


def named_paths(config: SystemConfig) -> list[str]:
    """Return the strings in an experiment's settings that may be paths of its input files or folders, sorted."""
    settings = config.model_dump(
        mode="json", by_alias=True, exclude={"output", "sweep", "name", "replications", "description", "capacity"}
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
    """Return the run folders at a path (the path itself or folders below it) in natural order of their names."""
    if (path / "manifest.json").exists() or not path.is_dir():
        return [path]
    found = sorted(
        (manifest.parent for manifest in path.rglob("manifest.json") if not _is_hidden(manifest, path)),
        key=lambda run: ([natural(part) for part in run.parts], str(run)),
    )
    return found or [path]


def find_all_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders at these paths, without duplicates."""
    return list({os.path.realpath(found): found for path in paths for found in find_runs(path)}.values())


def _is_hidden(manifest: Path, path: Path) -> bool:
    """Return whether any folder between `path` and a manifest has a name that begins with a dot, as folders of parts of
    a run and of incomplete runs do.
    """
    return any(name.startswith(".") for name in manifest.relative_to(path).parts)


def _changed_entries(before: object, now: Mapping[str, object]) -> list[str]:
    """Return the names whose value differs between two mappings that both have the name."""
    known = before if isinstance(before, dict) else {}
    return [name for name, value in now.items() if known.get(name, value) != value]


def _changed_code(manifest: Mapping[str, Any]) -> list[str]:
    """Return texts that name the packages whose code differs from that of a run, given the run's manifest. Plug-ins are
    compared by their source, this package by its version.
    """
    before = {one.get("package"): one.get("code", "") for one in manifest.get("plugins", ())}
    now = {one.package: one.code for one in load_registry().plugins}
    changed = [f"the code of {name}" for name in _changed_entries(before, now) if before[name]]
    return [*changed, *_changed_entries(manifest.get("versions"), {"vajra-py": __version__})]


class RunFolder:
    """Folder of one run; it is locked against other runs from `start` to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def is_finished(self, config: SystemConfig) -> bool:
        """Return whether the folder has the complete results of exactly these settings, input files and plug-ins."""
        manifest = self._manifest()
        is_same = manifest.get("config_digest") == config_digest(config) and not self._changed(config)
        return is_same and manifest.get("status") == FINISHED

    def holds_other_results(self, config: SystemConfig) -> bool:
        """Return whether the folder contains anything other than a run of these settings."""
        if not self.path.exists() or {one.name for one in self.path.iterdir()} <= _FIRST_FILES:
            return False
        return self._manifest().get("config_digest") != config_digest(config)

    def check(self, config: SystemConfig, *, overwrite: bool) -> None:
        """Raise `ConfigError` if a run with these settings must not be written to the folder.

        That is the case if the folder contains files that do not belong to a run, or further runs in its subfolders (of
        a sweep or a capacity search). Unless `overwrite` is set, it is also the case if the folder contains results of
        other settings, or of input files or plug-ins that have changed since.
        """
        is_other = self.holds_other_results(config)
        if self._holds_further_runs() or (is_other and "config_digest" not in self._manifest()):
            message = "contains something other than a run, and is left as it is"
            raise ConfigError(Problem(f"output {self.path}", message, "Another name or folder, or an empty one"))
        changed = [] if overwrite else self._changed(config)
        if changed:
            message = f"contains results computed before a change of {', '.join(changed)}"
            raise ConfigError(Problem(f"output {self.path}", message, "Another name or folder, or overwrite it"))
        if is_other and not overwrite:
            raise ConfigError(
                Problem(
                    f"output {self.path}",
                    "holds the results of other settings",
                    "Give the experiment another name (`--set name=…`) or folder (`--set output.dir=…`), or overwrite it",
                )
            )

    def _holds_further_runs(self) -> bool:
        """Return True if subfolders hold other runs than this run's simulation, or if a capacity search wrote its
        answers to this folder.
        """
        further = self.path.rglob("*/manifest.json")
        return (self.path / CAPACITY_FILE).exists() or any(one.parent != self.path / SIMULATED for one in further)

    def start(self, config: SystemConfig, registry: Registry, *, overwrite: bool, is_private: bool = False) -> None:
        """Lock and empty the folder and write the first files of a run of these settings; with `is_private`, only the
        folder's owner can read it.

        Raises the errors of `check`, and `ConfigError` while another run is written there.
        """
        self.check(config, overwrite=overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self.check(config, overwrite=overwrite)
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if is_private:
            self.path.chmod(0o700)
        manifest = run_manifest(config, registry)
        environment = manifest.pop("environment")
        self._facts = {**manifest, "config_digest": config_digest(config), "files": files_digest(config)}
        self._write_json("environment.json", environment)
        (self.path / "config.yaml").write_text(dump_effective(config))
        self.note(RUNNING)

    def note(self, status: str, **facts: Any) -> None:
        """Write the run's status and further facts to its manifest."""
        self._facts.update(facts)
        self._write_json("manifest.json", {**self._facts, "status": status})

    def close(self) -> None:
        """Release the folder for other runs."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        """Lock the folder itself, so that a killed process leaves no lock file."""
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            message = "another run is being written to it"
            raise ConfigError(
                Problem(f"output {self.path}", message, "Wait for it, or another name or folder")
            ) from None
        except OSError:  # the file system has no locks: continue without one
            pass
        self._lock = lock

    def _changed(self, config: SystemConfig) -> list[str]:
        """Return the input files, the plug-ins, and the version of this package that have changed since the results
        were written.
        """
        manifest = self._manifest()
        return [*_changed_entries(manifest.get("files"), files_digest(config)), *_changed_code(manifest)]

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
