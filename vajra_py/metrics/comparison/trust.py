"""Limitations of a comparison's numbers, as sentences for the reader."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vajra_py.metrics.comparison.compared_settings import OVERALL, ComparedSettings
from vajra_py.metrics.comparison.intervals import mser5
from vajra_py.metrics.comparison.step_time_trust import cost_origins, judged_differences, step_time_origins
from vajra_py.metrics.runs.replications import Setting
from vajra_py.metrics.runs.run_data import REQUESTS_FILE, RunData
from vajra_py.metrics.summary.warnings import MIN_COMPLETED

_NAMED = ("ttft_mean_s", "ttft_p99_s")
_P99_COMPLETED = 5000
_WIDE_FRACTION = 0.25
"""Relative half width of an interval above which a warning is given."""

_WARMUP_FRACTION = 0.02
"""A warm-up is reported only if it covers more than this fraction of the requests."""

_DISAGREE = f"Its seeds disagree: the 95 % interval of mean or P99 TTFT is wider than ±{_WIDE_FRACTION:.0%} of the value. More replications or longer runs narrow it."


def warnings_of(settings: Sequence[Setting], comparison: ComparedSettings) -> list[tuple[str, list[str]]]:
    """Return warnings, each with the names of the settings or runs that it applies to (an empty list means all)."""
    runs = [run for setting in settings for run in setting.runs]
    found: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    for setting in settings:
        if setting.note:
            notes.setdefault(setting.note, []).append(setting.name)
    for run in runs:
        if not run.is_finished:
            found.setdefault("Did not come to its end: these are the numbers up to where it stopped.", []).append(
                run.name
            )
        for sentence in run.summary.value("warnings") or []:
            # Sentences that begin with "The run is" give the reason for the stability label, and are shown with it.
            if not sentence.startswith("The run is ") and sentence not in notes:
                found.setdefault(sentence, []).append(run.name)
    warnings = [
        (sentence, names if len(names) < len(runs) or len(runs) == 1 else []) for sentence, names in found.items()
    ]
    warnings += [(note, names if len(names) < len(settings) else []) for note, names in notes.items()]
    versions = {str(run.manifest.get("versions")) for run in runs}
    if len(versions) > 1:
        warnings.append(("The runs were made by different versions of the software; see the manifests.", []))
    origins = [(f"Step times are {sentence}.", names) for sentence, names in step_time_origins(runs)]
    judged: list[tuple[str, list[str]]] = [(f"{text}.", []) for text in judged_differences(runs, comparison)]
    costs = [(f"{sentence}.", names) for sentence, names in cost_origins(runs)]
    return [*origins, *judged, *warnings, *_of_chance(settings, comparison), *costs]


def _of_chance(settings: Sequence[Setting], comparison: ComparedSettings) -> list[tuple[str, list[str]]]:
    """Return warnings about random variation and short runs: settings with one seed only, intervals that are too wide
    to be informative, and single runs that are too short for a P99 or begin with a warm-up.
    """
    warnings = []
    single = [setting.name for setting in settings if _is_of_one_seed(setting)]
    if single and len(settings) > 1:
        warnings.append(
            (
                "Run with one seed: no difference is tested, small ones may be chance. `replications: 5` in the experiment runs each setting with five seeds.",
                single if len(single) < len(settings) else [],
            )
        )
    wide = [
        f"{name}: ±{share:.0%}"
        for i, name in enumerate(comparison.names)
        if (share := _relative_width(comparison, i)) > _WIDE_FRACTION
    ]
    if wide:
        warnings.append((_DISAGREE, wide))
    if any(len(setting.runs) == 1 for setting in settings):
        warnings += _of_length(settings)
    return warnings


def _is_of_one_seed(setting: Setting) -> bool:
    """Return whether the setting was run with one seed, so that its random variation is unknown."""
    return len(setting.runs) == 1 and not setting.is_copied


def _of_length(settings: Sequence[Setting]) -> list[tuple[str, list[str]]]:
    """Return warnings about runs without replications that are too short for a P99 or start with a warm-up."""
    runs = [setting.first for setting in settings if len(setting.runs) == 1]
    short = [run.name for run in runs if MIN_COMPLETED <= _completed(run) < _P99_COMPLETED]
    warm = [f"{run.name}: {count}" for run in runs if (count := warmup_requests(run))]
    found = []
    if short:
        found.append(
            (
                f"Fewer than {_P99_COMPLETED:,} requests completed in one run: fewer than 50 lie above the 99th percentile, which is uncertain.",
                short,
            )
        )
    if warm:
        found.append(("MSER-5 takes the first requests for warm-up; `warmup_requests: auto` leaves them out.", warm))
    return found


def warmup_requests(run: RunData) -> int:
    """Return the number of requests at the start of the measurement window that MSER-5 classifies as warm-up, by
    end-to-end latency; 0 if they are too few to matter.
    """
    if not (run.path / REQUESTS_FILE).exists():
        return 0
    latencies = run.measured("e2e_s")["e2e_s"]
    known = latencies[np.isfinite(latencies)]
    found = mser5(known)
    return found if found > _WARMUP_FRACTION * len(known) else 0


def _completed(run: RunData) -> int:
    return int(run.summary.value("overall.e2e_s.count") or 0)


def _relative_width(comparison: ComparedSettings, position: int) -> float:
    """Return the half width of a confidence interval divided by the value, for mean TTFT or for P99 TTFT, whichever
    quotient is larger; 0 if there are no intervals.
    """
    shares = [0.0]
    for key in _NAMED:
        value, interval = comparison.values[OVERALL][key][position], comparison.interval(key, position)
        if value and interval is not None:
            shares.append(interval.half_width / value)
    return max(shares)
