"""Detect runs that repeat another run. Runs that differ only in a seed without effect are copies, not replications.

Seeds that were not run because they would repeat another run are counted in the summaries of their setting's runs
(`SECTION`); existing repeated runs, such as those of an earlier version, are recognised by their results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from vajra_py.errors import RunError
from vajra_py.metrics.runs.run_data import REQUESTS_FILE, RunData
from vajra_py.runtime.records.arrow_arrays import numpy_array

SECTION = "replications"
"""Section of a summary: `asked` (number of seeds of the setting), `run` (number of distinct runs that they give), `why`
(a sentence).
"""
COPIED = "All seeds give equal requests and nothing else is random: one run, no interval, nothing tested"
"""Reason why a setting of several seeds counts as one observation; a sentence without its full stop."""
HOW = "In `workload`, `window: random`, `bootstrap` and `thin` draw replications from a trace."
MEASURED = "measured times"
"""Name of measured step times in lists of the quantities that vary between runs with equal requests."""
_TIMES = ("arrived_at", "first_token_at", "ended_at")
_LOAD = ("num_prompt_tokens", "num_output_tokens", "tenant", "slo_class")


def copies_sentence(num_seeds: int, num_runs: int) -> str:
    """Return a sentence on why a setting of `num_seeds` seeds has only `num_runs` runs."""
    if num_runs == 1:
        return (
            f"Its {num_seeds} seeds give equal requests, and nothing else in it is random: it is one run, without interval, test or mark, since copies "
            f"are no replications. {HOW}"
        )
    left = num_seeds - num_runs
    return f"Of its {num_seeds} seeds {left} give{'s' if left == 1 else ''} the run of another one and {'is' if left == 1 else 'are'} left out: copies are no replications."


def same_load_sentence(drawn: Sequence[str]) -> str:
    """Return a sentence on runs with equal requests; it names `drawn` as the only quantities that vary between them."""
    return f"Its seeds give equal requests: its runs differ by {' and '.join(drawn) or 'something else'} alone, and intervals leave out how requests vary. {HOW}"


def drawn_beside_workload(runs: Sequence[RunData]) -> list[str]:
    """Return the names of the quantities, besides requests, that vary between these runs: those that the manifests
    record as drawn from the seed, and measured times.
    """
    drawn = {name for run in runs for name in run.manifest.get("drawn_beside_workload") or []}
    backend = runs[0].config.get("backend")
    is_measured = isinstance(backend, dict) and bool(backend) and not backend.get("simulator")
    return sorted({*drawn, *([MEASURED] if is_measured else [])})


def originals(runs: Sequence[RunData]) -> list[int]:
    """Return the positions of the runs that do not repeat an earlier one, judged by their summaries and, if they exist,
    their requests tables.
    """
    by_summary: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        by_summary.setdefault(_results(run), []).append(i)
    found: list[int] = []
    for alike in by_summary.values():
        if len(alike) == 1:
            found += alike
            continue
        first: dict[str, int] = {}
        for i in alike:
            first.setdefault(_digest(runs[i], (*_TIMES, *_LOAD)), i)
        found += first.values()
    return sorted(found)


def num_asked(runs: Sequence[RunData]) -> int:
    """Return the number of seeds for which these runs of one setting stand. The runs must not repeat one another.

    It is the largest `asked` in the runs' summaries (`SECTION`), but at least the number of runs. A summary that states
    more distinct runs (`run`) than are given here is ignored.
    """
    asked = [int(run.summary.value(f"{SECTION}.asked") or 0) for run in runs]
    needed = [int(run.summary.value(f"{SECTION}.run") or 0) for run in runs]
    return max([len(runs), *(one for one, least in zip(asked, needed, strict=True) if least <= len(runs))])


def have_same_load(runs: Sequence[RunData]) -> bool:
    """Return whether these runs, which differ in their results, had equal requests; False if unknown."""
    prints = {_fingerprint(run) for run in runs}
    if "" not in prints:
        return len(prints) == 1
    counts = {json.dumps([run.summary.value("overall.counts.arrived"), _offered(run)]) for run in runs}
    if len(counts) > 1 or not all((run.path / REQUESTS_FILE).exists() for run in runs):
        return False
    return len({_digest(run, ("arrived_at", *_LOAD)) for run in runs}) == 1


def _fingerprint(run: RunData) -> str:
    workload = run.manifest.get("workload")
    return str(workload.get("fingerprint") or "") if isinstance(workload, dict) else ""


def _offered(run: RunData) -> Any:
    return run.summary.value("overall.offered_requests_per_s")


def _results(run: RunData) -> str:
    """Return a run's results as text, to be compared with the results of other runs. A run without arrivals is equal to
    no other run.
    """
    if not run.summary.value("overall.counts.arrived"):
        return str(run.path)
    return json.dumps([run.summary.value(key) for key in ("overall", "resources")], sort_keys=True)


def _digest(run: RunData, columns: Sequence[str]) -> str:
    """Return a digest of these columns of the requests table; empty if the table is missing or unreadable."""
    if not (run.path / REQUESTS_FILE).exists():
        return ""
    digest = hashlib.blake2b(digest_size=16)
    try:
        table = run.requests(*columns)
    except RunError:
        return ""
    for name in columns:
        values = numpy_array(table.column(name))
        data = "\0".join(map(str, values)).encode() if values.dtype == np.object_ else values.tobytes()
        digest.update(data)
    return digest.hexdigest()
