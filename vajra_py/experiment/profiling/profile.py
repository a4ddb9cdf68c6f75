"""Measure step times of a model and device over a grid of shapes and fit a formula to them.

First, a grid of batches is executed repeatedly in random order, so that other activity on the machine affects all of
them equally. A fixed reference batch is executed before each measurement: its time shows the machine's speed at that
moment, and times are normalised to the median speed. Durations of steps add up in a run, so the mean must be predicted.
But interrupted steps are slow outliers, so from a small number of measurements, the median of a batch is estimated
better than its mean. A batch's time is therefore its median, times the mean-to-median ratio over all shapes of its kind
(decodes only, or with prompts). The spread of measurements around their batch's time is kept as well, so that equal
steps of a simulation vary as much. Then the engine serves requests for a while, which shows the cost of forming a step
and whether the formula holds in a running engine. Each measurement is saved to a file at once, so that an interrupted
profile resumes where it stopped.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

import numpy as np

from vajra_py import __version__
from vajra_py.config import AdmissionConfig, SchedulingConfig, SystemConfig
from vajra_py.contract import BatchFeatures
from vajra_py.engine.compute import LoadRunner, ModelFacts, RunnerOptions
from vajra_py.engine.config import MODEL_BACKENDS, ModelBackendConfig
from vajra_py.engine.llm import DEFAULT_SCHEDULING, llm_config, system_keys
from vajra_py.engine.worker import placed, set_passive_omp_wait
from vajra_py.errors import ConfigError, Problem
from vajra_py.experiment.profiling.bench import Batch, Bench, Reference, paces
from vajra_py.experiment.profiling.live import LiveStep, serve_a_while
from vajra_py.experiment.profiling.other_load import OtherLoad
from vajra_py.latency.models.fitting import Measured, errors_of, fit_steps, held_out_errors
from vajra_py.latency.models.profiled import Profile
from vajra_py.latency.models.variation import Variation, factors_among
from vajra_py.runtime.support.gc_control import existing_objects_frozen
from vajra_py.runtime.support.seeds import SeedTree

_HOST_BLOCKS = 64
_REFERENCES_AROUND = 5
"""Number of reference times measured before the engine serves requests, and again afterwards; their median gives the
machine's speed in between.
"""
_FARTHEST = 10.0
"""Multiple of a batch's median to which its measurements are clipped before the mean is taken."""
_EVERY_ROW = 8
"""Number of decodes up to which batches of every size are measured. Of larger sizes, only the powers of two and the
maximum are measured.
"""
_FEWEST_TO_VARY = 3
"""Minimum number of passes for estimating the variation of equal steps."""

Report: TypeAlias = Callable[[int, int], None]
"""Called with (completed measurements, total measurements)."""


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Settings of a profile.

    Attributes:
        config: Engine and replicas; see `profile_config`.
        passes: Number of measurements of each batch, besides one warm-up.
        num_random: Number of random shapes besides the grid.
        seed: Seed of the random shapes and of the order of the batches.
        reference_s: Time of the reference batch, in seconds, at the speed to which all times are normalised; None for
            its median during the measurement.
    """

    config: SystemConfig
    passes: int = 5
    num_random: int = 40
    seed: int = 0
    reference_s: float | None = None


def profile_config(
    model: str | Path | None, config: Mapping[str, Any] | str | Path | None = None, overrides: Sequence[str] = ()
) -> SystemConfig:
    """Return the settings of a profile: those of an LLM (`vajra_py.engine.llm.llm_config`) on one replica. Raises
    `ConfigError`.

    `config` may be any experiment, simulated or not. Only its sizes and its engine are used; without `model`, the
    engine's model is profiled. Its policies and latency model are ignored, so the experiment may name the profile that
    is about to be measured.
    """
    given = system_keys(config)
    given.pop("sweep", None)
    backend = given.get("backend")
    if isinstance(backend, Mapping) and set(backend) == {"simulator"}:
        del given["backend"]
    made = llm_config(model if model is not None else _model_of(given, config), given, overrides)
    settings: ModelBackendConfig = made.backend.settings
    if made.replicasets:
        message = f"a profile is of one replica ({len(made.replicasets)} replicasets)"
        raise ConfigError(Problem("replicasets", message, "Allowed: none"))
    if settings.tensor_parallel > 1:
        message = f"a profile is made in one process (got {settings.tensor_parallel})"
        raise ConfigError(Problem(f"backend.{settings.kind}.tensor_parallel", message, "Allowed: 1"))
    unpredicted = made.backend.model_copy(update={settings.kind: settings.model_copy(update={"latency": None})})
    return made.model_copy(
        update={
            "scheduling": SchedulingConfig.model_validate(DEFAULT_SCHEDULING),
            "num_replicas": 1,
            "admission": AdmissionConfig(),
            "observers": (),
            "backend": unpredicted,
        }
    )


def _model_of(given: Mapping[str, Any], config: Mapping[str, Any] | str | Path | None) -> Path:
    """Return the path of the experiment engine's model, resolved relative to the experiment's file."""
    backend = given.get("backend")
    named = [backend.get(kind) for kind in MODEL_BACKENDS] if isinstance(backend, Mapping) else []
    model = next((one.get("model") for one in named if isinstance(one, Mapping)), None)
    if not isinstance(model, str):
        where = f"{config}: model" if isinstance(config, str | Path) else "model"
        raise ConfigError(Problem(where, "is missing", "`--model DIR`, or a `--config` whose backend names one"))
    beside = Path(config).parent / model if isinstance(config, str | Path) else Path(model)
    return beside if not Path(model).is_absolute() and beside.exists() else Path(model)


def profile_model(
    settings: ProfileSettings, output: Path, report: Report | None = None, load: LoadRunner | None = None
) -> Profile:
    """Measure step times, fit the profile and write it to `output`; until then, measurements are kept in a file beside
    it.

    Raises `ConfigError` for invalid settings; errors of loading the model are passed on.
    """
    config = settings.config
    replica = config.replica
    engine: ModelBackendConfig = config.backend.settings
    replicasets = config.effective_replicasets
    problems = [*engine.problems(replicasets), *engine.problems_here(replicasets)]
    if problems:
        raise ConfigError(problems)
    set_passive_omp_wait()
    options = placed(engine.runner_options(replica, replica.pipeline_stages or 1, engine.num_threads), 0)
    if options.num_ranks > 1:
        message = f"a profile is measured on one rank (the settings make a replica of {options.num_ranks})"
        raise ConfigError(
            Problem("profile", message, "Allowed: tensor_parallel 1, pipeline_stages 1, kv_parallel.groups 1")
        )
    runner = (load or engine.load)(Reference.room(options))
    others = OtherLoad()
    try:
        num_blocks = replica.memory.num_blocks or runner.profile_num_blocks(replica.memory.memory_fraction)
        host_blocks = max(_HOST_BLOCKS, replica.memory.host_blocks) if engine.can_swap else 0
        runner.allocate(num_blocks + Reference.num_blocks(options), host_blocks)
        facts = _facts(runner.facts, options, num_blocks)
        ahead = options.device.startswith("cuda") and engine.begins_ahead is not False
        batches = list(_batches(settings, runner.facts, options, num_blocks, ahead))
        journal = _Journal(output.with_suffix(".measured.jsonl"), facts, batches)
        total = len(batches) * settings.passes
        bench = Bench(runner, options.block_size, num_blocks, begins_ahead=ahead)
        reference = Reference(runner, options, num_blocks)
        with existing_objects_frozen():
            _measure_grid(settings, batches, (bench, reference), journal, report)
        reference.frees(bench)
        typical_s = settings.reference_s or journal.typical_reference_s
        around_s = [reference.time_s() for _ in range(_REFERENCES_AROUND)]
        live = serve_a_while(config, num_blocks, runner)
        around_s += [reference.time_s() for _ in range(_REFERENCES_AROUND)]
        slowness = median(around_s) / typical_s
        live = [replace(one, time_s=one.time_s / slowness, overhead_s=one.overhead_s / slowness) for one in live]
    finally:
        runner.close()
    if report is not None:
        report(total, total)
    found = {"other_load_cores": others.cores(), "reference_s": typical_s}
    steady = _Steady.of([batch.shape(bench.bytes_per_block) for batch in batches], settings.passes, journal, typical_s)
    profile = _fitted(steady, live, ahead, {**facts, **found}, settings.seed)
    profile.write(output)
    journal.remove()
    return profile


def _facts(facts: ModelFacts, options: RunnerOptions, num_blocks: int) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(facts).items() if name != "eos_token_ids"},
        "model": options.model,
        "num_threads": options.num_threads,
        "max_batch_size": options.max_requests,
        "num_blocks": num_blocks,
        "machine": platform.machine(),
        "processor": platform.processor() or platform.machine(),
        "vajra_py": __version__,
    }


def _fitted(steady: _Steady, live: Sequence[LiveStep], ahead: bool, facts: Mapping[str, Any], seed: int) -> Profile:
    """Return a profile with one formula for the whole step on the engine's clock.

    The cost of forming a step hardly depends on the sizes of its chunks. It is fitted to the steps of the running
    engine (`live`) as a base, a cost per decode and a cost per chunk, and added to the times of the grid (`steady`).
    The whole times of the live steps are only compared with the formula. If decodes begin `ahead`, forming a
    decode-only step overlaps with the previous step, so nothing is added for such steps. The live steps were measured
    without this overlap, so decode-only ones are not compared.
    """
    overhead = fit_steps([Measured(_counts_only(one.features), one.overhead_s) for one in live]) if live else None

    def is_hidden(one: Measured) -> bool:
        return ahead and one.kind == "decode" and not one.features.swap_bytes

    def added_s(one: Measured) -> float:
        return 0.0 if overhead is None or is_hidden(one) else overhead.time_s(_counts_only(one.features))

    whole = [Measured(one.features, one.time_s + added_s(one)) for one in steady.grid]
    fit = fit_steps(whole)
    errors = held_out_errors(whole, SeedTree(seed).stream("held out").permutation(len(whole)).tolist())
    compared = [one for one in (Measured(step.features, step.time_s) for step in live) if not is_hidden(one)]
    if compared:
        errors["live"] = errors_of(fit.time_s, compared)["all"]
    return Profile(fit, facts, errors, len(whole), steady.variation)


def _counts_only(features: BatchFeatures) -> BatchFeatures:
    return BatchFeatures(num_decodes=features.num_decodes, num_prefills=features.num_prefills)


# Selection of batches


def _batches(
    settings: ProfileSettings, facts: ModelFacts, options: RunnerOptions, num_blocks: int, ahead: bool
) -> Iterator[Batch]:
    """Yield the batches of the grid and random batches, all of which fit into memory."""
    stream = SeedTree(settings.seed).stream("batches")
    replica = settings.config.replica
    sizes = _Sizes(
        max_rows=replica.max_batch_size,
        max_tokens=options.max_step_tokens,
        max_len=facts.max_model_len,
        num_blocks=num_blocks,
        block_size=facts.block_size,
        can_swap=settings.config.backend.settings.can_swap,
    )
    seen: set[tuple[Any, ...]] = set()
    for batch in (*_grid(sizes, stream), *(_random_batch(sizes, stream) for _ in range(settings.num_random))):
        key = (len(batch.decodes), sum(batch.decodes), batch.chunks, batch.num_swapped)
        if batch.num_blocks(facts.block_size, ahead) <= num_blocks and key not in seen:
            seen.add(key)
            yield batch


@dataclass(frozen=True, slots=True)
class _Sizes:
    max_rows: int
    max_tokens: int
    max_len: int
    num_blocks: int
    block_size: int
    can_swap: bool


def _powers(low: int, high: int, factor: int) -> list[int]:
    """Return `low`, `low * factor`, … and `high`."""
    values = []
    while low < high:
        values.append(low)
        low *= factor
    return [*values, high]


def _grid(sizes: _Sizes, stream: np.random.Generator) -> Iterator[Batch]:
    longest_context = max(1, sizes.max_len - 2)
    longest_chunk = max(1, min(sizes.max_tokens, sizes.max_len - 1))
    contexts = _powers(16, longest_context, 4)
    for rows in sorted({*range(1, min(_EVERY_ROW, sizes.max_rows) + 1), *_powers(1, sizes.max_rows, 2)}):
        for context in contexts:
            yield Batch(_ragged(rows, context, longest_context, stream))
    for tokens in _powers(2, longest_chunk, 2):
        for context in (0, *contexts):
            if tokens + context < sizes.max_len:
                yield Batch((), ((tokens, context),))
    for rows in _powers(2, sizes.max_rows, 4):
        for tokens in _powers(8, longest_chunk, 4):
            if rows * tokens <= sizes.max_tokens:
                yield Batch((), ((tokens, 0),) * rows)
    for rows in _powers(2, max(2, sizes.max_rows - 1), 4):
        for context in contexts[::2]:
            for tokens in _powers(8, longest_chunk, 4):
                if rows + tokens <= sizes.max_tokens:
                    yield Batch(_ragged(rows, context, longest_context, stream), ((tokens, 0),))
    for moved in (4, 16, _HOST_BLOCKS) if sizes.can_swap else ():
        yield Batch(_ragged(2, 16, longest_context, stream), (), min(moved, sizes.num_blocks))


def _ragged(rows: int, context: int, longest: int, stream: np.random.Generator) -> tuple[int, ...]:
    """Return random context lengths around a mean, varied like those of requests that arrived one by one."""
    drawn = stream.uniform(0.25, 1.75, rows) * context
    return tuple(int(one) for one in np.clip(drawn, 1, longest))


def _random_batch(sizes: _Sizes, stream: np.random.Generator) -> Batch:
    """Return a random feasible batch, with sizes distributed log-uniformly."""

    def log_uniform(low: int, high: int) -> int:
        return int(np.exp(stream.uniform(np.log(low), np.log(max(low, high) + 1))))

    longest = max(1, sizes.max_len - 2)
    num_rows = log_uniform(1, sizes.max_rows)
    num_chunks = int(stream.integers(0, min(4, num_rows) + 1))
    decodes = _ragged(num_rows - num_chunks, log_uniform(8, longest), longest, stream)
    chunks: list[tuple[int, int]] = []
    left = sizes.max_tokens - len(decodes)
    for _ in range(num_chunks):
        tokens = min(log_uniform(1, longest), max(1, left))
        left -= tokens
        context = 0 if stream.random() < 0.5 else log_uniform(1, longest - tokens) if longest > tokens else 0
        if left >= 0 and tokens + context < sizes.max_len:
            chunks.append((tokens, context))
    return Batch(decodes, tuple(chunks)) if decodes or chunks else Batch((1,))


# Measurement


class _Journal:
    """File of measurements, from which a later profile with equal settings resumes."""

    def __init__(self, path: Path, facts: Mapping[str, Any], batches: Sequence[Batch]) -> None:
        self._path = path
        header = {"facts": dict(facts), "batches": [asdict(batch) for batch in batches]}
        self.done: dict[tuple[int, int], tuple[float, float]] = {}
        """(Seconds of the batch, seconds of the reference before it), by (pass, position of the batch)."""
        text = json.dumps(header)
        if path.exists():
            lines = path.read_text().splitlines()
            if lines and lines[0] == text:
                self._read(lines[1:])
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def _read(self, lines: Sequence[str]) -> None:
        for line in lines:
            try:
                turn, index, seconds, reference_s = json.loads(line)
            except ValueError:  # the last line of an interrupted profile may be incomplete
                continue
            self.done[turn, index] = (seconds, reference_s)

    def note(self, turn: int, index: int, seconds: float, reference_s: float) -> None:
        """Add a measurement."""
        self.done[turn, index] = (seconds, reference_s)
        with self._path.open("a") as file:
            file.write(json.dumps([turn, index, seconds, reference_s]) + "\n")

    @property
    def typical_reference_s(self) -> float:
        """Median time of the reference."""
        return median(reference_s for _, reference_s in self.done.values())

    def steady_s(self, typical_s: float) -> dict[tuple[int, int], float]:
        """Return the batches' times in seconds, normalised to the speed at which the reference takes `typical_s`."""
        slowness = paces([reference_s for _, reference_s in self.done.values()], typical_s)
        return {key: time_s / slow for (key, (time_s, _)), slow in zip(self.done.items(), slowness, strict=True)}

    def remove(self) -> None:
        """Remove the file of measurements once the profile is written."""
        self._path.unlink(missing_ok=True)


def _measure_grid(
    settings: ProfileSettings,
    batches: Sequence[Batch],
    measures: tuple[Bench, Reference],
    journal: _Journal,
    report: Report | None,
) -> None:
    bench, reference = measures
    tree = SeedTree(settings.seed)
    warm: set[int] = set()
    total = len(batches) * settings.passes
    for turn in range(settings.passes):
        for index in tree.stream(f"pass {turn}").permutation(len(batches)).tolist():
            if (turn, index) in journal.done:
                continue
            if index not in warm:
                bench.time_s(batches[index])
                warm.add(index)
            reference_s = reference.time_s()
            journal.note(turn, index, bench.time_s(batches[index]), reference_s)
            if report is not None:
                report(len(journal.done), total)


@dataclass(frozen=True, slots=True)
class _Steady:
    """Expected time of each measured batch, and the variation of equal steps."""

    grid: Sequence[Measured]
    variation: Variation | None

    @classmethod
    def of(cls, shapes: Sequence[BatchFeatures], passes: int, journal: _Journal, typical_s: float) -> _Steady:
        """Compute expected times from a complete journal."""
        steady_s = journal.steady_s(typical_s)
        times_s = [[steady_s[turn, index] for turn in range(passes)] for index in range(len(shapes))]
        medians_s = [median(one) for one in times_s]
        multiples: dict[bool, list[float]] = {True: [], False: []}
        for features, one, median_s in zip(shapes, times_s, medians_s, strict=True):
            multiples[features.num_prefills > 0] += [min(_FARTHEST, time_s / median_s) for time_s in one]
        lengthened = {has_prompts: mean(found) for has_prompts, found in multiples.items() if found}
        grid = [
            Measured(features, median_s * lengthened[features.num_prefills > 0])
            for features, median_s in zip(shapes, medians_s, strict=True)
        ]
        decodes, prompts = (factors_among(multiples[has_prompts] or [1.0]) for has_prompts in (False, True))
        return cls(grid, Variation(decodes, prompts) if passes >= _FEWEST_TO_VARY else None)
