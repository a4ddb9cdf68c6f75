"""Replay a router's recording without servers: the same policies receive the same events and must decide the same."""

from __future__ import annotations

import tempfile
from itertools import groupby, zip_longest
from pathlib import Path

from vajra_py.config import SystemConfig
from vajra_py.errors import Problem, RunError
from vajra_py.experiment.runs.replay import ReplayReport
from vajra_py.plugins import Registry
from vajra_py.route.build import build_router, route_settings
from vajra_py.route.core import RouteCore
from vajra_py.route.records import PLACEMENTS_FILE, PlacementLog
from vajra_py.runtime.records.admission_log import ADMISSIONS_FILE, AdmissionLog, read_admissions
from vajra_py.runtime.records.input_log import INPUTS_FILE, Arrival, PolicyViolation, read_inputs
from vajra_py.runtime.records.json_lines import read_rows


def replay_route(path: Path, config: SystemConfig, registry: Registry) -> ReplayReport:
    """Replay a recorded session of a router, and compare its decisions with the recorded ones.

    Raises `RunError` if the recording cannot be read, and `ConfigError` for wrong settings.
    """
    inputs = [one for one in read_inputs(path / INPUTS_FILE) if not isinstance(one, PolicyViolation)]
    settings = route_settings(config)
    controller = build_router(config, registry)
    salted = any(one.memory.tenant_salt for one in config.replica_settings)
    with tempfile.TemporaryDirectory(prefix="vajra-replay-") as folder:
        placements = PlacementLog(Path(folder) / PLACEMENTS_FILE)
        admissions = AdmissionLog(Path(folder) / ADMISSIONS_FILE)
        controller.watch([placements, admissions])
        core = RouteCore(controller, settings.max_tries, is_replay=True, tenant_salt=salted)
        try:
            for tick, group in groupby(inputs, key=lambda one: one.tick):
                core.at(tick, list(group))
        finally:
            placements.close()
            admissions.close()
        try:
            rows = list(read_rows(path / PLACEMENTS_FILE))
            admitted = list(read_admissions(path / ADMISSIONS_FILE))
        except (OSError, EOFError, ValueError) as error:
            raise RunError(str(Problem(str(path), f"its recording cannot be read ({error})"))) from error
        pairs = [
            ("decision", rows, list(read_rows(Path(folder) / PLACEMENTS_FILE))),
            ("admission decision", admitted, list(read_admissions(Path(folder) / ADMISSIONS_FILE))),
        ]
    difference = None
    for what, recorded, replayed in pairs:
        for number, (one, other) in enumerate(zip_longest(recorded, replayed), 1):
            if one != other and difference is None:
                difference = f"{what} {number}: {one} in the run, {other} in the replay"
    num_requests = sum(isinstance(one, Arrival) for one in inputs)
    return ReplayReport(len(rows), num_requests, difference, "decisions")
