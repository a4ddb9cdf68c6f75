"""Facts needed to repeat a run: settings, code and versions; in a separate section, the run's machine and time."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from msgspec import structs

from vajra_py import __version__
from vajra_py.config.schema import SystemConfig
from vajra_py.contract import Layer
from vajra_py.plugins import ADMISSION, RETENTION, SCALER, AnyOffer, Registry

MANIFEST_VERSION = 1
LIBRARIES = ("numpy", "pyarrow", "pydantic", "sortedcontainers", "xxhash")
"""Packages whose version can change a simulated result."""


def run_manifest(config: SystemConfig, registry: Registry) -> dict[str, Any]:
    """Return the facts of a run.

    Everything except `environment` is equal for equal settings, code and versions; `environment` (machine and time)
    belongs in a separate file, so that results can be compared byte for byte.
    """
    settings = config.model_dump(mode="json", by_alias=True)
    return {
        "manifest_version": MANIFEST_VERSION,
        "name": config.name,
        "seed": config.seed,
        "config": settings,
        "git": git_state(Path.cwd()),
        "versions": versions(),
        "plugins": [structs.asdict(each) for each in registry.plugins],
        "policies": _policies(config, registry),
        **_admission(config, registry),
        "environment": environment(),
    }


def versions() -> dict[str, str]:
    """Return the versions that determine a simulated result, except those of plug-ins."""
    libraries = {name: _version(name) for name in LIBRARIES}
    return {"vajra-py": __version__, "python": platform.python_version(), **libraries}


def _version(library: str) -> str:
    """Return a library's `__version__`; only if the library has none, read the version from its package metadata."""
    return getattr(import_module(library), "__version__", None) or metadata.version(library)


def environment() -> dict[str, Any]:
    """Return the machine and the current time."""
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "python_implementation": platform.python_implementation(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the folder's repository and a digest of uncommitted changes; None outside a repository (or
    without git).
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "diff", "HEAD") or ""
    digest = hashlib.sha256(changes.encode()).hexdigest()[:12] if changes else None
    return {"commit": commit, "uncommitted_changes": digest}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=20,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def _policies(config: SystemConfig, registry: Registry) -> dict[str, dict[str, dict[str, str]]]:
    """Return policy, package and version of each replicaset's layers, scaler and retention policies."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, replicaset in config.effective_replicasets.items():
        scheduling = replicaset.scheduling
        offers: dict[str, AnyOffer] = {
            layer.value: registry.policy(layer, scheduling.choice(layer).policy) for layer in Layer
        }
        if scheduling.scaling is not None:
            offers[SCALER.key] = registry.scaler(scheduling.scaling.policy)
        if scheduling.retention is not None:
            offers[RETENTION.key] = registry.retention_policy(scheduling.retention.policy)
        for pool, settings in replicaset.pools.items():
            if settings.retention is not None:
                offers[f"{RETENTION.key} of {pool}"] = registry.retention_policy(settings.retention.policy)
        found[name] = {key: _origin(offer) for key, offer in offers.items()}
    return found


def _admission(config: SystemConfig, registry: Registry) -> dict[str, dict[str, str]]:
    """Return a section with the admission policy, its package and version; empty without an admission policy."""
    choice = config.admission_policy
    if choice is None:
        return {}
    return {ADMISSION.key: _origin(registry.admission_policy(choice.policy))}


def _origin(offer: AnyOffer) -> dict[str, str]:
    return {"policy": offer.spec.name, "package": offer.package, "version": offer.version}
