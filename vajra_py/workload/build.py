"""Build the workload that a configuration describes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from vajra_py.errors import WorkloadError
from vajra_py.workload.distributions import zipf_shares
from vajra_py.workload.file_options import FileOptions
from vajra_py.workload.options import WorkloadOptions
from vajra_py.workload.resample import block_bootstrap, random_window, thin
from vajra_py.workload.synthetic import RngFor, stream_facts
from vajra_py.workload.workload import SloClass, Workload

__all__ = ["build_workload", "with_options"]


def build_workload(
    config: WorkloadOptions, rng_for: RngFor, base_dir: Path, *, source: Workload | None = None
) -> Workload:
    """Build the workload that `config` describes.

    Args:
        config: settings of the section `workload:`.
        rng_for: returns the random stream of a name: `arrivals`, `arrival_rates`, `lengths`, `turns`, `think_times`,
            `system_prompts`, `resets`, `classes`, `rows`, `dither`, `bootstrap`, `thin`, `window`, `shapes`, `graphs`,
            `priorities`, `tenants`, `slo_classes`. For a part of a merged workload, the part's `name` or else its
            `type` (numbered if it is repeated, as `azure#2`) and a slash precede the stream's name. `source["streams"]`
            of the result lists the streams used.
        base_dir: folder for relative paths.
        source: result of `config.source` if it is known, so that files are not read again; else None.

    Raises:
        WorkloadError: a file is broken (with its line), or the source cannot provide what the configuration requires.
    """
    used: dict[str, np.random.Generator] = {}

    def recorded(name: str) -> np.random.Generator:
        rng = rng_for(name)
        used[name] = rng
        return rng

    read = source if source is not None else config.source(recorded, base_dir)
    workload = with_options(read, config, recorded)
    if not len(workload):
        raise WorkloadError(workload.name, None, "no request is left after cutting and limits", "At least one request")
    facts = {**workload.source, "streams": stream_facts(used)} if used else workload.source
    return Workload(workload.columns, workload.name, facts)


def with_options(workload: Workload, config: WorkloadOptions, rng_for: RngFor) -> Workload:
    """Apply the options common to all types, in the order documented in `vajra_py.workload.options`."""
    if config.name is not None:
        workload = workload.renamed(config.name)
    if config.start_s is not None or config.end_s is not None or config.skip:
        workload = workload.slice(start_s=config.start_s, end_s=config.end_s, skip=config.skip)
    num_drawn = len(workload)
    if config.max_prompt_tokens is not None or config.max_total_tokens is not None:
        workload = workload.limit_lengths(config.max_prompt_tokens, config.max_total_tokens, config.too_long)
    if not len(workload):
        return workload
    kept = len(workload) / num_drawn
    rate = config.mean_rate()
    rate = None if rate is None else rate * kept
    if isinstance(config, FileOptions):
        if rate is None and (config.window is not None or config.bootstrap is not None):
            rate = workload.rate or None  # rate of the whole trace, which is the mean rate of its random samples
        workload = _sampled(workload, config, rng_for)
    if config.first is not None and getattr(config, "window", None) is None:
        workload = workload.slice(first=config.first)
    if config.rate is not None:
        workload = _at_pace(workload, config, rate)
    if config.time_scale is not None:
        workload = workload.scale_time(config.time_scale)
    if config.max_tokens is not None:
        workload = workload.with_max_tokens(config.max_tokens)
    if config.priorities:
        shares = {entry.priority: entry.share for entry in config.priorities}
        workload = workload.with_priorities(shares, rng_for("priorities"))
    if config.tenants is not None:
        tenants = config.tenants
        if tenants.shares is not None:
            named = dict(tenants.shares)
        else:
            drawn = zipf_shares(tenants.count or 1, tenants.zipf_exponent)
            named = {f"tenant-{index}": share for index, share in enumerate(drawn.tolist())}
        workload = workload.with_tenants(named, rng_for("tenants"))
    if config.slo_classes:
        classes = [
            SloClass(entry.name, entry.share, entry.model_dump(exclude={"name", "share"}))
            for entry in config.slo_classes
        ]
        workload = workload.with_slo_classes(classes, rng_for("slo_classes"))
    return workload


def _sampled(workload: Workload, config: FileOptions, rng_for: RngFor) -> Workload:
    """Return a sample of the trace drawn with the seed, or the trace itself if no sampling is configured."""
    if config.bootstrap is not None:
        blocks = config.bootstrap
        workload = block_bootstrap(
            workload,
            rng_for("bootstrap"),
            block_s=blocks.block_s,
            block_requests=blocks.block_requests,
            first=None if config.thin is not None else config.first,
        )
    if config.thin is not None:
        workload = thin(workload, rng_for("thin"), rate=config.thin.rate, fraction=config.thin.fraction)
    if config.window is not None:
        workload = random_window(workload, rng_for("window"), num_requests=config.first, duration_s=config.window_s)
    return workload


def _at_pace(workload: Workload, config: WorkloadOptions, expected: float | None) -> Workload:
    """Return the workload stretched to `config.rate`, or unchanged if its source has applied this rate.

    `expected` is the mean rate over all seeds before stretching. If it is known, `config.rate` is the mean rate over
    the results of all seeds. If it is None, each result has exactly this rate. Raises `WorkloadError` if requests
    follow one another and the workload does not have this rate already.
    """
    assert config.rate is not None  # checked by the caller
    if config.starts_sessions_at_rate and workload.columns.session_id is not None:
        return workload  # the source has applied the rate
    if expected is None or workload.has_followers:
        is_there = math.isclose(workload.rate, config.rate, rel_tol=1e-12)
        return workload if is_there else workload.at_rate(config.rate)
    return workload if expected == config.rate else workload.scale_time(expected / config.rate)
