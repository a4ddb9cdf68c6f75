"""Compare the workloads that several seeds draw from one configuration, without running them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vajra_py.workload.build import build_workload
from vajra_py.workload.file_options import SAMPLING_OPTIONS
from vajra_py.workload.fingerprint import fingerprint
from vajra_py.workload.options import WorkloadOptions
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload

__all__ = ["Draws"]


class Draws:
    """Fingerprints of workloads by configuration and seed.

    If consecutive configurations or seeds use the same file with the same options, the file is read once.
    """

    def __init__(self, base_dir: Path) -> None:
        self._base_dir = base_dir
        self._key = ""
        self._source: Workload | None = None

    def fingerprints(self, config: WorkloadOptions, seeds: Sequence[RngFor]) -> list[str]:
        """Return the fingerprint of the workload for each seed; `seeds` holds the random streams of each seed.

        Raises `WorkloadError` like `build_workload`.
        """
        found: list[str] = []
        for rng_for in seeds:
            noted = _Noted(rng_for)
            workload = build_workload(config, noted, self._base_dir, source=self._known(config, noted))
            found.append(fingerprint(workload.columns))
            if not noted.has_drawn:  # no random number was drawn, so all seeds give this workload
                return found * len(seeds)
        return found

    def _known(self, config: WorkloadOptions, noted: _Noted) -> Workload:
        """Return the requests before common options are applied; cached if they do not depend on the seed."""
        key = config.model_dump_json(exclude={*WorkloadOptions.model_fields, *SAMPLING_OPTIONS})
        if self._source is not None and key == self._key:
            return self._source
        source = config.source(noted, self._base_dir)
        if not noted.has_drawn:
            self._key, self._source = key, source
        return source


class _Noted:
    """Random streams that record whether any of them was used."""

    def __init__(self, rng_for: RngFor) -> None:
        self._rng_for = rng_for
        self.has_drawn = False

    def __call__(self, name: str) -> np.random.Generator:
        self.has_drawn = True
        return self._rng_for(name)
