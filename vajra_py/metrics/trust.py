"""What limits the numbers of a comparison, in sentences: what a reader must know before trusting them."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_py.metrics.comparison import OVERALL, Comparison
from vajra_py.metrics.replications import Setting

_NAMED = ("ttft_mean_s", "ttft_p99_s")
_WIDE_FRACTION = 0.25
"""Half of an interval's width over its value from which on a number says little."""


def warnings_of(settings: Sequence[Setting], comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Sentences, each with the settings or runs that it is about (none: all)."""
    runs = [run for setting in settings for run in setting.runs]
    found: dict[str, list[str]] = {}
    for run in runs:
        if not run.is_finished:
            found.setdefault("Did not come to its end: these are the numbers up to where it stopped.", []).append(
                run.name
            )
        for sentence in run.summary.value("warnings") or []:
            # The verdict says why a run is not stable.
            if not sentence.startswith("The run is "):
                found.setdefault(sentence, []).append(run.name)
    warnings = [
        (sentence, names if len(names) < len(runs) or len(runs) == 1 else []) for sentence, names in found.items()
    ]
    versions = {str(run.manifest.get("versions")) for run in runs}
    if len(versions) > 1:
        warnings.append(("The runs were made by different versions of the software; see the manifests.", []))
    return [*warnings, *_of_chance(settings, comparison)]


def _of_chance(settings: Sequence[Setting], comparison: Comparison) -> list[tuple[str, list[str]]]:
    """What chance may have done: settings of one seed, and intervals too wide to say much."""
    warnings = []
    single = [setting.name for setting in settings if len(setting.runs) == 1]
    if single and len(settings) > 1:
        warnings.append(
            (
                "Run with one seed: no difference is tested, small ones may be chance. `replications: 5` in the experiment runs each setting with five seeds.",
                single if len(single) < len(settings) else [],
            )
        )
    wide = [
        f"{setting.name}: ±{share:.0%}"
        for i, setting in enumerate(settings)
        if len(setting.runs) > 1 and (share := _relative_width(comparison, i)) > _WIDE_FRACTION
    ]
    if wide:
        warnings.append(
            (
                f"Its seeds disagree: the 95 % interval of mean or P99 TTFT is wider than ±{_WIDE_FRACTION:.0%} of the value. More replications or longer runs narrow it.",
                wide,
            )
        )
    return warnings


def _relative_width(comparison: Comparison, position: int) -> float:
    """The widest of the intervals that matter, as half of its width over the value."""
    shares = [0.0]
    for key in _NAMED:
        value, interval = comparison.values[OVERALL][key][position], comparison.interval(key, position)
        if value and interval is not None:
            shares.append(interval.half_width / value)
    return max(shares)
