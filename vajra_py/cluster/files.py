"""Transfer of an experiment's input files to the nodes of a cluster, and of result folders back.

Each file is sent once: its bytes are put into the cluster's object store, keyed by their digest. A node works in
the folder WORKSPACE/PATH, where PATH is the path of this machine's current folder. Files are written there under their
relative paths, so that settings and results have the same paths as here. A file with an absolute path is written
to that path; if the node has a different file at that path, this is an error.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vajra_py.config import ExperimentConfig
from vajra_py.errors import ConfigError, Problem, RunError
from vajra_py.experiment.runs.folder import named_paths

MANIFEST = "manifest.json"
_TEXTS = (".json", ".yaml")
MOST_BYTES = 4 << 30
"""Maximum total size of all files sent, in bytes."""


@dataclass(frozen=True, slots=True)
class ShippedFile:
    """Input file of a run."""

    path: str
    """Path as in the settings, for messages; files of a folder have the folder's name as prefix."""
    digest: str
    content: Any
    """Reference to its bytes in the object store."""


class Shipment:
    """Input files of runs; equal contents are put into the object store once."""

    def __init__(self, put: Callable[[bytes], Any]) -> None:
        """`put` stores bytes in the object store and returns a reference to them."""
        self._put = put
        self._known: dict[tuple[str, int, int], ShippedFile] = {}
        self._contents: dict[str, Any] = {}
        self._num_bytes = 0

    def files_of(self, config: ExperimentConfig) -> list[ShippedFile]:
        """Return the input files of this experiment. Raises `ConfigError` if their total size is too large."""
        found = []
        for name in named_paths(config):
            if os.path.isfile(name):  # unlike `Path.is_file`, False for a name that is too long
                found.append(self._file(name))
            elif os.path.isdir(name):
                found += [self._file(str(one)) for one in sorted(Path(name).rglob("*")) if one.is_file()]
        return found

    def _file(self, name: str) -> ShippedFile:
        facts = os.stat(name)
        key = (name, facts.st_mtime_ns, facts.st_size)
        if key not in self._known:
            self._num_bytes += facts.st_size
            if self._num_bytes > MOST_BYTES:
                message = (
                    f"the files that the experiments name are too large to be sent to a cluster ({name}, and others)"
                )
                raise ConfigError(Problem("--on", message, f"Allowed: {MOST_BYTES >> 30} GiB altogether"))
            content = Path(name).read_bytes()
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            if digest not in self._contents:
                self._contents[digest] = self._put(content)
            self._known[key] = ShippedFile(name, digest, self._contents[digest])
        return self._known[key]


@dataclass(frozen=True, slots=True)
class Workspace:
    """Working folder on each node during one use of a cluster.

    Attributes:
        name: name of the folder in the node's temporary directory.
        folder: current folder of the submitting machine.
    """

    name: str
    folder: str

    @property
    def root(self) -> Path:
        """Path of the workspace on this node."""
        return Path(tempfile.gettempdir()) / self.name

    def enter(self, files: list[ShippedFile], fetch: Callable[[Any], bytes]) -> None:
        """Change to the submitter's folder below `root`, and write the files there. A file with an absolute path is
        written to that path. Raises `RunError` if a file cannot be written.
        """
        here = self.root / self.folder.lstrip("/")
        here.mkdir(parents=True, exist_ok=True)
        os.chdir(here)
        for one in files:
            _place(one, fetch)

    def text_as_asked(self, text: str | None) -> str | None:
        """Return the text with paths as on the submitting machine, without the prefix `root`."""
        return None if text is None else text.replace(str(self.root), "")

    def as_asked(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return a run's files, with paths in texts as on the submitting machine."""
        root = str(self.root).encode()
        return {name: one.replace(root, b"") if name.endswith(_TEXTS) else one for name, one in files.items()}

    def remove(self) -> None:
        """Remove the workspace from this node."""
        shutil.rmtree(self.root, ignore_errors=True)


def _place(file: ShippedFile, fetch: Callable[[Any], bytes]) -> None:
    path = Path(file.path)
    try:
        if path.exists():
            if hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() == file.digest:
                return
            if path.is_absolute():
                raise RunError(
                    f"{path}: a node of the cluster has another file under this name. Name it by a relative path."
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(fetch(file.content))
        os.replace(partial, path)  # atomic, since other processes may write the same file concurrently
    except OSError as error:
        message = f"cannot be written on a node of the cluster ({error.strerror or error})"
        raise RunError(f"{path}: {message}. Name it by a relative path.") from None


def packed(folder: Path) -> dict[str, bytes]:
    """Return the contents of a result folder's files, by path in the folder."""
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Write these files as a result folder; an existing one is replaced only after all files were written."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # The manifest is written last, because it marks a folder as a run.
    for name in sorted(files, key=lambda one: (one == MANIFEST, one)):
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
