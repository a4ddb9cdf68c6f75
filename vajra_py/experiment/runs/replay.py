"""Replay an engine's run in the simulator and compare the decisions.

The run's requests are submitted to the simulator at the recorded ticks, and every step has its recorded duration. The
two decision logs must be equal, row for row, which verifies that the policy decides the same in simulator and engine.
A policy that depends on anything besides its inputs, or a mechanism with different sizes, causes a difference.
"""

from __future__ import annotations

import json
import re
import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from vajra_py.config import ReplicaConfig, SystemConfig, load_system
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.engine.config import ModelBackendConfig
from vajra_py.errors import Problem, RunError, VajraError
from vajra_py.experiment.runs.engined import ENGINE_FILE, length_predictor, predictions
from vajra_py.experiment.runs.folder import FINISHED, RUNNING
from vajra_py.experiment.runs.replayed_kv import ReplayedConnector
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.records.admission_log import ADMISSIONS_FILE, AdmissionLog, read_admissions
from vajra_py.runtime.records.decision_log import DecisionLog
from vajra_py.runtime.records.decision_reader import is_cut, read_decisions
from vajra_py.runtime.records.draft_log import DRAFTS_FILE, DraftLog, read_drafts
from vajra_py.runtime.records.input_log import (
    INPUTS_FILE,
    Abort,
    AdapterEnd,
    Answer,
    Arrival,
    CacheReport,
    Expiry,
    Input,
    PolicyViolation,
    ProgramIdle,
    Readmission,
    RecordedOutput,
    ReplicaChange,
    Retry,
    ServerReport,
    StageEnd,
    Swap,
    TierEnd,
    TransferEnd,
    WakeUp,
    read_inputs,
)
from vajra_py.runtime.records.json_lines import read_rows
from vajra_py.runtime.records.output_log import OUTPUTS_FILE
from vajra_py.runtime.records.retention_log import RETENTION_FILE, RetentionLog, read_retention
from vajra_py.runtime.requests.draft_inputs import Verification
from vajra_py.runtime.requests.kv_inputs import KvAnswer, KvEnd, KvNews
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.build import ModelFacts, ReplicasetModel, Services, build_controller
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.step.plan import PlannedChunk, StepPlan, StepResult
from vajra_py.runtime.support.clock import TICKS_PER_SECOND, to_seconds
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.decode_runs import ends_of
from vajra_py.sim.executor import SimulatedExecutor
from vajra_py.sim.simulator import Acceptance, SimulationOptions, Simulator

DECISIONS_FILE = "decisions.parquet"
_RECURRING = PolicyViolation | StageEnd | Answer | ServerReport | CacheReport | KvAnswer | KvEnd
"""Types of recorded inputs that are not injected: the replay, its connector or its router produces them again."""
_Config = TypeVar("_Config", bound=SystemConfig)
_NANOSECOND = TICKS_PER_SECOND // 10**9
_NEVER_CAME_BACK = 10**6 * TICKS_PER_SECOND
"""Duration, in ticks, of a step whose end was not recorded."""
_PLACE = re.compile(r" \([^()]+:\d+ in [^()]+\)(?=\.?$)")  # place in a policy's code, at a detail's end


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded run of an engine."""

    path: Path
    config: SystemConfig
    inputs: Sequence[Input]
    outputs: Mapping[int, RecordedOutput]
    """Recorded outputs by the request's index."""
    durations: Mapping[tuple[str, int], Mapping[int, int]]
    """Duration of each step in ticks, by (replicaset, replica) and step index."""
    stage_ends: Mapping[tuple[str, int], Mapping[int, int]]
    """Tick at which each step left the first of several pipeline stages, by the keys of `durations`."""
    ended_at: int
    """Tick of the last recorded event."""
    engine: Mapping[str, Any]

    @property
    def knows_tokens(self) -> bool:
        """True if the prefix cache identifies requests by their tokens."""
        return any(isinstance(one, Arrival) and one.prompt_token_ids is not None for one in self.inputs)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of a replay.

    Attributes:
        num_steps: Number of recorded steps that computed tokens and ended.
        num_requests: Number of requests that were submitted in the run.
        difference: First difference between the decision logs; None if they are equal.
    """

    num_steps: int
    num_requests: int
    difference: str | None
    unit: str = "steps"
    """Unit of `num_steps`: steps, or decisions for a router, which has no steps."""

    @property
    def is_equal(self) -> bool:
        """True if there is no difference."""
        return self.difference is None


def read_recording(path: Path, registry: Registry | None = None) -> Recording:
    """Return a run's recording. Raises `RunError` if the folder has none, `ConfigError` if its settings are invalid."""
    if not (path / "config.yaml").exists():
        raise RunError(str(Problem(str(path), "is not a run's folder (config.yaml is missing)")))
    config = load_system(path / "config.yaml", registry=registry)
    if not isinstance(config.backend.settings, ModelBackendConfig):
        message = f"is a run of the {config.backend.kind}; only what computed with a model can be replayed"
        raise RunError(str(Problem(str(path), message, "Run it again to repeat it")))
    if not config.output.decision_log:
        raise RunError(
            str(Problem(str(path), "has no decision log", "Allowed: runs with `output: {decision_log: true}`"))
        )
    if is_cut(path / DECISIONS_FILE) or (not (path / DECISIONS_FILE).exists() and _status(path) == RUNNING):
        message = "was cut off (its process was killed, or still runs), so not everything that it did is known"
        hint = "Allowed: runs that came to an end; what was decided until the cut: RunData.decisions()"
        raise RunError(str(Problem(str(path), message, hint)))
    inputs = read_inputs(path / INPUTS_FILE)
    import pyarrow as pa

    try:
        engine = json.loads((path / ENGINE_FILE).read_text())
        outputs = {
            row["index"]: RecordedOutput(
                row["token_ids"],
                row["reason"],
                row.get("detail", ""),
                row.get("failed_at"),
                dict(row.get("proposals", ())),
                {place: accepted for place, _, accepted in row.get("drafts", ())},
            )
            for row in read_rows(path / OUTPUTS_FILE)
        }
        durations, last = _durations(read_decisions(path / DECISIONS_FILE))
    except (OSError, EOFError, ValueError, KeyError, pa.ArrowException) as error:
        raise RunError(str(Problem(str(path), f"its recording cannot be read ({error})"))) from error
    last = max([last, *(one.tick for one in inputs)])
    return Recording(path, config, inputs, outputs, durations, _stage_ends(inputs), last, engine)


def _durations(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[tuple[str, int], dict[int, int]], int]:
    found: dict[tuple[str, int], dict[int, int]] = {}
    last = 0
    for row in rows:
        formed = _ticks(row["formed_at"])
        last = max(last, formed)
        if row["chunks"] and row["ended_at"] is not None:
            ended = _ticks(row["ended_at"])
            last = max(last, ended)
            found.setdefault((row["replicaset"], row["replica_id"]), {})[row["step"]] = ended - formed
    return found, last


def _stage_ends(inputs: Iterable[Input]) -> dict[tuple[str, int], dict[int, int]]:
    found: dict[tuple[str, int], dict[int, int]] = {}
    for one in inputs:
        if isinstance(one, StageEnd):
            found.setdefault((one.replicaset, one.replica_id), {})[one.step] = one.tick
    return found


def _ticks(seconds: float) -> int:
    return round(seconds * 10**9) * _NANOSECOND


def replay(path: Path, registry: Registry | None = None) -> ReplayReport:
    """Replay a run of the engine in the simulator and compare the decisions. Raises the errors of `read_recording`."""
    registry = registry or load_registry()
    recording = read_recording(path, registry)
    with tempfile.TemporaryDirectory(prefix="vajra-replay-") as folder:
        log = Path(folder) / DECISIONS_FILE
        error, violations = _replay_log(recording, registry, log)
        difference = _compare_logs(path / DECISIONS_FILE, log) or _compare_lines(path, Path(folder))
    difference = difference or _compare_violations(recording, violations)
    if difference is None and error is not None and _status(path) == FINISHED:
        difference = f"the replay ended otherwise than the run: {error}"
    num_steps = sum(map(len, recording.durations.values()))
    return ReplayReport(num_steps, sum(isinstance(one, Arrival) for one in recording.inputs), difference)


def _status(path: Path) -> str:
    return str(RunData(path).manifest.get("status"))


# Simulation


class _RecordedTimer:
    """Timer that replays the recorded step durations of one replica."""

    def __init__(self, replica: Replica, recording: Recording) -> None:
        self._replica = replica
        key = (replica.replicaset, replica.replica_id)
        self._ticks = recording.durations.get(key, {})
        self._stage_ends = recording.stage_ends.get(key, {})

    def stage_ticks(self, plan: StepPlan) -> int:
        """See `StepTimer`."""
        return self._ticks.get(plan.step_index, _NEVER_CAME_BACK)

    def first_stage_ticks(self, plan: StepPlan) -> int:
        """See `TimesFirstStage`."""
        return self._stage_ends.get(plan.step_index, plan.formed_at + _NEVER_CAME_BACK) - plan.formed_at

    def run_ends(self, now: int, num_decodes: int, first_context_tokens: int, num_steps: int) -> array[int]:
        """See `TimesRuns`; the first step is the one just formed."""
        first = self._replica.num_steps - 1
        known = [self._ticks.get(index, -1) for index in range(first, first + num_steps)]
        if -1 in known:
            end = known.index(-1)
            known[end:] = [_NEVER_CAME_BACK] + [1] * (num_steps - end - 1)
        return ends_of(now, known)


class _RecordedExecutor(SimulatedExecutor):
    """Executor that replays each request's recorded tokens and end."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._outputs = recording.outputs
        self._late = {one.step for one in recording.inputs if isinstance(one, Verification)}
        """Steps whose results were still unknown when the next step was formed."""
        self._drafts_unseen = any(facts.get("drafts_unseen") for facts in recording.engine.values())
        self._nothing = RecordedOutput()
        self.replicasets: Mapping[str, Replicaset] = {}
        """Replicasets of the replay, once they are built."""
        self.connector: ReplayedConnector | None = None
        """Connector of the single replica, once it is built; None if the replica has none."""

    def known_output_tokens(self, request: Request) -> int | None:
        """Return a request's number of output tokens: as recorded if the request completed, one more than recorded if
        it failed; else None.
        """
        output = self._outputs.get(request.index, self._nothing)
        if output.failed_at is not None:
            return len(output.token_ids) + 1
        return len(output.token_ids) if output.reason in (EndReason.STOP.value, EndReason.LENGTH.value) else None

    def result(self, plan: StepPlan) -> StepResult:
        """Return the recorded result of a step: tokens, stops, failures and accepted drafts."""
        tokens: list[tuple[Request, int]] = []
        stopped: list[Request] = []
        failed: dict[Request, str] = {}
        accepted: dict[Request, int] = {}
        withheld = {one.request for one in plan.chunks if self._withholds(one, plan.replica_id)}
        for request, num_tokens, computed_before, _ in plan.entries():
            output, position = self._outputs.get(request.index, self._nothing), request.num_output_tokens
            end, count = computed_before + num_tokens, 1
            drafts = plan.drafts.get(request)
            if drafts is not None and drafts.is_padding:
                end -= drafts.num_tokens
            elif drafts is not None:
                end = request.num_known_tokens  # drafts may have been accepted since the step was formed
                accepted[request] = output.accepted.get(position, 0) if drafts.num_tokens else 0
                count += accepted[request]
            if output.failed_at is not None and position == len(output.token_ids) and end >= output.failed_at:
                failed[request] = output.detail
            elif end == request.num_known_tokens and position < len(output.token_ids) and request not in withheld:
                tokens += [(request, token) for token in output.token_ids[position : position + count]]
                if output.reason == EndReason.STOP.value and position + count >= len(output.token_ids):
                    stopped.append(request)
        report = None if self.connector is None else self.connector.report(plan)
        is_ahead = plan.step_index in self._late  # accepted drafts are then reported later, by a recorded input
        return StepResult(tokens, frozenset(stopped), failed, {} if is_ahead else accepted, report, is_ahead)

    def num_drafts(self, requests: Sequence[Request], at_most: int) -> Sequence[int]:
        """Return each request's recorded number of drafts; `at_most` if the workers' drafts were not recorded."""
        if self._drafts_unseen:
            return [at_most] * len(requests)
        found = [(self._outputs.get(one.index, self._nothing).proposals, one.num_output_tokens) for one in requests]
        return [min(at_most, proposals.get(count, 0)) for proposals, count in found]

    def _withholds(self, chunk: PlannedChunk, replica_id: int) -> bool:
        return self.replicasets[chunk.request.replicaset].replicas[replica_id].withholds_token(chunk)

    def withheld_token(self, request: Request) -> StepResult:
        """Return a result with the next recorded token of the request."""
        output, position = self._outputs.get(request.index, self._nothing), request.num_output_tokens
        tokens = [(request, token) for token in output.token_ids[position : position + 1]]
        is_last = output.reason == EndReason.STOP.value and position + 1 == len(output.token_ids)
        return StepResult(tokens, frozenset((request,) if is_last else ()))


def _simulator(recording: Recording, registry: Registry, logs: Sequence[Observer]) -> Simulator:
    controller, executor = _controller(recording, registry)
    controller.watch(logs)
    memories = [one.memory for one in recording.config.replica_settings]
    repeats = not recording.knows_tokens and all(one.tiers is None for one in memories)
    options = SimulationOptions(
        horizon_s=to_seconds(recording.ended_at) + 1.0,
        drain=False,
        tenant_salt=any(one.tenant_salt for one in memories),
        fast_forward=repeats,  # off with known tokens (steps then cache blocks) and with tiers (steps then copy blocks)
        expires=False,
        times_transfers=False,
        wakes=False,
        isolates_policies=any(isinstance(one, PolicyViolation) for one in recording.inputs),
    )
    simulator = Simulator(
        controller,
        executor,
        lambda replica: _RecordedTimer(replica, recording),
        options,
    )
    for one in recording.inputs:
        if isinstance(one, Arrival):
            accepted = Acceptance(one.spec(), one.arrived_at, salt=one.salt, reads_cache=one.reads_cache)
            simulator.inject(one.tick, Phase.ARRIVAL, accepted)
        elif isinstance(one, Expiry | Readmission | Abort):
            phase = {Expiry: Phase.EXPIRY, Readmission: Phase.ADMISSION, Abort: Phase.ABORT}[type(one)]
            simulator.inject(one.tick, phase, one.request_id)
        elif isinstance(one, ProgramIdle):
            simulator.inject(one.tick, Phase.PROGRAM, one.program_id)
        elif isinstance(one, Swap):
            simulator.inject(one.tick, Phase.POLICY, one.change())
        elif isinstance(one, WakeUp):
            simulator.inject(one.tick, Phase.WAKE, one)
        elif isinstance(one, ReplicaChange):
            simulator.inject(one.tick, Phase.SCALING, one)
        elif isinstance(one, TransferEnd | Retry):
            simulator.inject(one.tick, Phase.TRANSFER, one)
        elif isinstance(one, AdapterEnd | TierEnd):
            simulator.inject(one.tick, Phase.TIER, one)
        elif not isinstance(one, _RECURRING) and not (isinstance(one, KvNews) and one.step is not None):
            simulator.inject(one.tick, Phase.FAILURE, one)
    return simulator


def _controller(recording: Recording, registry: Registry) -> tuple[Controller, _RecordedExecutor]:
    config, engine = recording.config, recording.engine
    settings = config.backend.settings
    seeds = SeedTree(config.seed).child("policies")
    lengths = {
        one.facts.request_id: one.num_output_tokens
        for one in recording.inputs
        if isinstance(one, Arrival) and one.num_output_tokens is not None
    }
    executor = _RecordedExecutor(recording)
    models = {
        name: ReplicasetModel(
            predictions(settings.of(name), registry),
            ModelFacts(None, facts["max_model_len"], facts["kv_bytes_per_token"]),
        )
        for name, facts in engine.items()
    }
    first = next(iter(models.values()))
    connector = next((facts.get("connector") for facts in engine.values()), None)
    services = Services(
        registry=registry,
        latency=first.latency,
        output_lengths=length_predictor(settings, seeds, lengths, registry),
        seeds=seeds,
        facts=first.facts,
        executor_of=lambda replicaset, replica_id: executor,
        reserves_growth=connector is None,  # failed loads name blocks by id, so blocks are assigned at once
        models=models,
        served_models=settings.served_models(engine),
    )
    controller = build_controller(sized_config(config, engine), services)
    executor.replicasets = controller.replicasets
    if connector is not None:
        executor.connector = ReplayedConnector(controller.only_replica(), connector, recording.inputs)
    return controller, executor


def sized_config(config: _Config, engine: Mapping[str, Any]) -> _Config:
    """Return the settings with the sizes that the engine determined: KV blocks and maximum length of each replicaset's
    model.
    """
    replicasets = {}
    for name, one in config.effective_replicasets.items():
        if one.pools:
            found = engine[name]["pools"]
            pools = {
                pool: own.model_copy(update={"replica": _sized(own.replica, found[pool])})
                for pool, own in one.pools.items()
            }
            replicasets[name] = one.model_copy(update={"pools": pools})
        else:
            replicasets[name] = one.model_copy(update={"replica": _sized(one.replica, engine[name])})
    return config.model_copy(update={"replicasets": replicasets})


def _sized(replica: ReplicaConfig, found: Mapping[str, Any]) -> ReplicaConfig:
    memory = replica.memory
    if memory.num_blocks is None:
        memory = memory.model_copy(update={"num_blocks": found["num_blocks"] + replica.adapter_blocks})
    sizes = {"memory": memory, "max_model_len": replica.max_model_len or found["max_model_len"]}
    return replica.model_copy(update=sizes)


def _replay_log(
    recording: Recording, registry: Registry, target: Path
) -> tuple[VajraError | None, Sequence[tuple[int, str, str]]]:
    """Replay into a decision log; return (error that ended the replay or None, violations that did not end it)."""
    logs = (
        DecisionLog(target),
        AdmissionLog(target.with_name(ADMISSIONS_FILE)),
        RetentionLog(target.with_name(RETENTION_FILE)),
        DraftLog(target.with_name(DRAFTS_FILE)),
    )
    simulator = _simulator(recording, registry, logs)
    try:
        simulator.run(())
    except VajraError as error:
        return error, simulator.violations
    finally:
        for log in logs:
            log.close()
    return None, simulator.violations


# Comparison


def _compare_logs(recorded: Path, replayed: Path) -> str | None:
    """Describe the first step that differs between the decision logs; None if all are equal."""
    pairs = zip_longest(read_decisions(recorded), read_decisions(replayed))
    for number, (one, other) in enumerate(pairs, 1):
        if one != other:
            return f"row {number}: {_difference(one, other)}"
    return None


def _compare_lines(recorded: Path, replayed: Path) -> str | None:
    """Describe the first difference in admission decisions, retained content or drafts; None if there is none."""
    logs = (
        ("admission decision", ADMISSIONS_FILE, read_admissions),
        ("retention", RETENTION_FILE, read_retention),
        ("drafts", DRAFTS_FILE, read_drafts),
    )
    for what, file, read in logs:
        try:
            pairs = zip_longest(*(read(one / file) for one in (recorded, replayed)))
            for number, (one, other) in enumerate(pairs, 1):
                if one != other:
                    return f"{what} {number}: {_short(one)} in the run, {_short(other)} in the replay"
        except (OSError, EOFError, ValueError) as error:
            raise RunError(str(Problem(str(recorded / file), f"cannot be read ({error})"))) from error
    return None


def _compare_violations(recording: Recording, replayed: Sequence[tuple[int, str, str]]) -> str | None:
    """Return the first difference between the contract violations of the replay and of the run, or None. Places in the
    policies' code are not compared, since paths depend on the installation.
    """
    recorded = [(one.tick, one.replicaset, one.detail) for one in recording.inputs if isinstance(one, PolicyViolation)]
    for one, other in zip_longest(recorded, replayed):
        tick, replicaset, detail = one or other or (0, "", "")
        what = f"at {to_seconds(tick):.9f} s replicaset {replicaset} went out of service"
        if one is None or other is None:
            return f"{what}, only in the {'run' if other is None else 'replay'}: {detail}"
        if [_PLACE.sub("", str(fact)) for fact in one] != [_PLACE.sub("", str(fact)) for fact in other]:
            return f"{what}: {detail}; in the replay at {to_seconds(other[0]):.9f} s replicaset {other[1]}: {other[2]}"
    return None


def _difference(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    if one is None or other is None:
        row = one or other or {}
        who = "the run" if other is None else "the replay"
        return f"only {who} has step {row['step']} of replica {row['replica_id']} (formed at {row['formed_at']:.9f} s)"
    where = f"step {one['step']} of replica {one['replica_id']}, formed at {one['formed_at']:.9f} s"
    fields = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    reasons = "; ".join(
        f"{name} {_short(one.get(name))} in the run, {_short(other.get(name))} in the replay" for name in fields
    )
    return f"{where}: {reasons}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "..."
