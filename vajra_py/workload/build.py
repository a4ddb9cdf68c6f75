"""Build the workload that a configuration describes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np

from vajra_py.errors import WorkloadError
from vajra_py.workload.arrays import F64
from vajra_py.workload.arrivals import ArrivalProcess, arrival_times
from vajra_py.workload.config import (
    AgenticConfig,
    AzureConfig,
    BurstGptConfig,
    CsvConfig,
    FileOptions,
    JsonlConfig,
    LengthsConfig,
    MergeConfig,
    MooncakeConfig,
    ProfileConfig,
    ProgramFileConfig,
    ProgramsConfig,
    SessionsConfig,
    SyntheticConfig,
    WorkloadConfig,
    WorkloadOptions,
)
from vajra_py.workload.pace import expected_rate
from vajra_py.workload.profiles import profile
from vajra_py.workload.programs import programs_workload
from vajra_py.workload.read_agentic import read_agentic
from vajra_py.workload.read_csv import CsvLayout, read_azure, read_burstgpt, read_csv, read_lengths
from vajra_py.workload.read_jsonl import read_jsonl
from vajra_py.workload.read_mooncake import MooncakeOptions, read_mooncake
from vajra_py.workload.read_programs import read_programs
from vajra_py.workload.resample import block_bootstrap, random_window, thin
from vajra_py.workload.sessions import sessions_workload, zipf_shares
from vajra_py.workload.synthetic import ClosedLoop, RngFor, closed_loop_workload, stream_facts, synthetic_workload
from vajra_py.workload.workload import SloClass, Workload, distinct_names

__all__ = ["build_workload", "source_of"]


def build_workload(
    config: WorkloadConfig, rng_for: RngFor, base_dir: Path, *, source: Workload | None = None
) -> Workload:
    """Build the workload that `config` describes.

    Args:
        config: section `workload:`.
        rng_for: returns the random stream of a name: `arrivals`, `arrival_rates`, `lengths`, `turns`, `think_times`,
            `system_prompts`, `resets`, `classes`, `rows`, `dither`, `bootstrap`, `thin`, `window`, `shapes`, `graphs`,
            `priorities`, `tenants`, `slo_classes`. In a merged workload, the part's `name` (or its `type`, numbered as
            `azure#2`) and a slash precede the name. `source["streams"]` of the result lists the streams used.
        base_dir: folder for relative paths.
        source: result of `source_of` for the same configuration, so that files are not read again.

    Raises:
        WorkloadError: a file is broken (with its line), or the source cannot provide what the configuration requires.
    """
    used: dict[str, np.random.Generator] = {}

    def recorded(name: str) -> np.random.Generator:
        rng = rng_for(name)
        used[name] = rng
        return rng

    read = source if source is not None else _source(config, recorded, base_dir)
    workload = _with_options(read, config, recorded)
    if not len(workload):
        raise WorkloadError(workload.name, None, "no request is left after cutting and limits", "At least one request")
    facts = {**workload.source, "streams": stream_facts(used)} if used else workload.source
    return Workload(workload.columns, workload.name, facts)


def source_of(config: WorkloadConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    """Return the requests before the options common to all types are applied; raises like `build_workload`."""
    return _source(config, rng_for, base_dir)


def _with_options(workload: Workload, config: WorkloadOptions, rng_for: RngFor) -> Workload:
    """Apply the options common to all types, in the order documented in `vajra_py.workload.config`."""
    if config.name is not None:
        workload = workload.renamed(config.name)
    if config.start_s is not None or config.end_s is not None or config.skip:
        workload = workload.slice(start_s=config.start_s, end_s=config.end_s, skip=config.skip)
    num_drawn = len(workload)
    if config.max_prompt_tokens is not None or config.max_total_tokens is not None:
        workload = workload.limit_lengths(config.max_prompt_tokens, config.max_total_tokens, config.too_long)
    kept = len(workload) / num_drawn if num_drawn else 1.0
    rate = expected_rate(config)
    rate = None if rate is None else rate * kept
    if isinstance(config, FileOptions):
        if rate is None and (config.window is not None or config.bootstrap is not None):
            rate = workload.rate or None  # rate of the whole trace, which is the mean over samples
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
    """Return the workload stretched to `config.rate`.

    If `expected`, the mean rate over seeds before, is known, the result has this rate on average; otherwise exactly.
    """
    assert config.rate is not None  # checked by the caller
    if isinstance(config, ProfileConfig) and workload.columns.session_id is not None:
        return workload  # sessions already start at this rate
    if expected is None or workload.has_followers:
        is_there = math.isclose(workload.rate, config.rate, rel_tol=1e-12)
        return workload if is_there else workload.at_rate(config.rate)
    return workload if expected == config.rate else workload.scale_time(expected / config.rate)


def _starts(process: ArrivalProcess, rng_for: RngFor) -> Callable[[int], F64]:
    """Return a function that draws the first n arrival times of a process."""

    def times(number: int) -> F64:
        return arrival_times(process, rng_for("arrivals"), rng_for("arrival_rates"), num_requests=number)

    return times


@singledispatch
def _source(config: Any, rng_for: RngFor, base_dir: Path) -> Workload:
    """Return the workload of one type before any common option is applied."""
    raise TypeError(f"no kind of workload ({type(config).__name__})")


@_source.register
def _(config: AzureConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    return read_azure(base_dir / config.path, sort=config.sort, drop_empty=config.drop_empty)


@_source.register
def _(config: BurstGptConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    return read_burstgpt(
        base_dir / config.path,
        sort=config.sort,
        drop_empty=config.drop_empty,
        model=config.model,
        log_type=config.log_type,
    )


@_source.register
def _(config: MooncakeConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    options = MooncakeOptions(config.block_tokens, config.tick_s, config.drop_empty, config.sort)
    return read_mooncake(base_dir / config.path, options, rng_for("dither") if config.tick_s else None)


@_source.register
def _(config: LengthsConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    return read_lengths(
        base_dir / config.path,
        arrivals=None if config.arrivals is None else _starts(config.arrivals, rng_for),
        num_requests=config.num_requests,
        sample=rng_for("rows") if config.sample else None,
        layout=CsvLayout(
            {str(key): name for key, name in config.columns.items()}, sort=config.sort, drop_empty=config.drop_empty
        ),
    )


@_source.register
def _(config: CsvConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    layout = CsvLayout({str(key): name for key, name in config.columns.items()}, config.time_unit, config.metadata)
    return read_csv(base_dir / config.path, replace(layout, sort=config.sort, drop_empty=config.drop_empty))


@_source.register
def _(config: JsonlConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    return read_jsonl(base_dir / config.path, sort=config.sort)


@_source.register
def _(config: AgenticConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    starts = _starts(config.arrivals, rng_for)
    return read_agentic(base_dir / config.path, starts, num_sessions=config.num_sessions, mode=config.mode)


@_source.register
def _(config: SyntheticConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    if isinstance(config.arrivals, ClosedLoop):
        return closed_loop_workload(config.arrivals, config, rng_for, config.num_requests or 0)
    return synthetic_workload(
        config.arrivals, config, rng_for, num_requests=config.num_requests, duration_s=config.duration_s
    )


@_source.register
def _(config: SessionsConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    return sessions_workload(
        config, config.arrivals, rng_for, num_sessions=config.num_sessions, duration_s=config.duration_s
    )


@_source.register
def _(config: ProgramsConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    return programs_workload(
        config, config.arrivals, rng_for, num_programs=config.num_programs, duration_s=config.duration_s
    )


@_source.register
def _(config: ProgramFileConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    starts = None if config.arrivals is None else _starts(config.arrivals, rng_for)
    path = base_dir / config.path
    return read_programs(path, starts, num_programs=config.num_programs, context=config.context)


@_source.register
def _(config: ProfileConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    return profile(config.profile, rng_for, config.num_requests, config.rate)


@_source.register
def _(config: MergeConfig, rng_for: RngFor, base_dir: Path) -> Workload:
    names = distinct_names([part.name or part.type for part in config.workloads])
    parts: list[Workload] = []
    for part, name in zip(config.workloads, names, strict=True):

        def streams(stream: str, part_name: str = name) -> np.random.Generator:
            return rng_for(f"{part_name}/{stream}")

        parts.append(_with_options(_source(part, streams, base_dir), part, streams))
    return parts[0].merge(*parts[1:], share_content=config.share_content)
