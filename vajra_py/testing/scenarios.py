"""Scenarios that every policy must pass.

They are small (at most 200 KV blocks, a few dozen requests), since every step is followed by a check that no request
and no block is lost.
The seed of every scenario is fixed, so two runs of the same policy must make the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from msgspec import structs

from vajra_py.config.adapters import AdapterConfig, AdaptersConfig
from vajra_py.contract import AdmissionDecision, ProgramView, ReplicaState, RequestView
from vajra_py.contract.observer import EndReason, Observer, StepEnd, StepRecord, StepRun
from vajra_py.latency import AffineModel
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.runtime.records.decision_reader import step_row
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.step.builder_options import DraftRules
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing.harness import Harness, HarnessOptions, PolicySource
from vajra_py.workload.request import PromptContent, RequestSpec, follows_of

STEP_TIME = AffineModel(base_s=0.004, per_token_s=0.0002, per_prefill_pair_s=2e-7, per_decode_context_token_s=1e-6)
"""Latency model of the scenarios. A step of 50 ms computes about 200 prompt tokens, so that policies with a target step
time must chunk prompts.
"""

SMALL = HarnessOptions(num_blocks=64, max_batch_size=8, latency=STEP_TIME, seed=7)


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a run."""

    prioritizer: PolicySource
    replicaset_scheduler: PolicySource
    replica_scheduler: PolicySource
    admission: PolicySource | None = None
    """Admission policy; None: every request is accepted."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One situation. Sizes are per replica: with n replicas, n times as many requests arrive in the same time."""

    name: str
    options: HarnessOptions
    requests: Callable[[np.random.Generator, int], list[RequestSpec]]
    is_memory_ample: bool = False
    """True if all batches within the limits also fit into memory."""
    num_aborted: int = 0
    down: frozenset[int] = frozenset()
    """Ids of replicas that accept no requests."""


@dataclass(slots=True)
class Outcome:
    """Decisions of a run, and the ends of its requests."""

    decisions: list[dict[str, Any]] = field(default_factory=list)
    """One row per formed step, as in the decision log, without the step's end."""
    ends: list[tuple[Any, ...]] = field(default_factory=list)
    """Ends in order: (request id, reason, time, time of the first token, times of all tokens, number of preemptions,
    time of the first admission)."""
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    """Steps as reported to observers at their ends."""
    requests: dict[str, Request] = field(default_factory=dict)
    programs: list[ProgramView] = field(default_factory=list)
    """Programs in the order of their ends."""
    admissions: list[tuple[Any, ...]] = field(default_factory=list)
    """Admission decisions as reported to observers: (request id, decision, time)."""
    num_unfinished: int = 0
    num_fast_forwarded: int = 0
    """Number of steps that were fast-forwarded, that is, not formed one by one."""


class StuckError(Exception):
    """Raised if many steps in a row make no progress."""


class _Watch(Observer):
    """Observer that fills an `Outcome`, and stops a run without progress."""

    def __init__(self, *, detailed: bool) -> None:
        self.wants_steps = detailed
        self.outcome = Outcome()
        self._num_futile = 0
        self._last_served = (-1, -1)
        self._alive: dict[str, Request] = {}

    def on_arrival(self, request: RequestView, now: float) -> None:
        self.outcome.requests[request.request_id] = self._alive[request.request_id] = cast(Request, request)

    def on_admission_decision(self, request: RequestView, policy: str, decision: AdmissionDecision, now: float) -> None:
        self.outcome.admissions.append((request.request_id, decision, now))

    def on_program_end(self, program: ProgramView, now: float) -> None:
        self.outcome.programs.append(program)

    def on_step_begin(self, step: StepRecord) -> None:
        self.outcome.decisions.append(step_row(step))

    def on_step_run(self, run: StepRun) -> None:
        self.outcome.num_fast_forwarded += len(run.ended_at)
        super().on_step_run(run)

    def on_step_end(self, step: StepEnd) -> None:
        finished = tuple((request.request_id, reason) for request, reason in step.finished)
        figures = (step.features, step.free_blocks, step.num_waiting, step.num_running, step.num_preempted)
        place = (step.replicaset, step.replica_id, step.step_index)
        self.outcome.steps.append((*place, step.formed_at, step.ended_at, *figures, finished))
        served = (len(self._alive), sum(request.num_output_tokens for request in self._alive.values()))
        if served != self._last_served:
            self._last_served, self._num_futile = served, 0
            return
        self._num_futile += 1
        if self._num_futile > 100 + sum(request.num_known_tokens for request in self._alive.values()):
            raise StuckError(f"{self._num_futile} steps in a row ended without a token for any request")

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        self._alive.pop(request.request_id, None)
        one = cast(Request, request)
        self.outcome.ends.append(
            (
                one.request_id,
                reason,
                now,
                one.first_token_at,
                tuple(token_times(one)),
                one.num_preemptions,
                one.admitted_at,
            )
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """Options of a scenario's run."""

    num_replicas: int = 1
    detailed: bool = True
    """True if every decision is recorded; the simulator then forms every step separately."""
    fast_forward: bool = True
    check_every_step: bool = True
    """True to check after every step that no request and no block is lost; False: only at the end."""
    policy_timeout_s: float | None = None
    """Real seconds after which a policy call counts as a violation of the contract; None: no limit."""


def simulate(scenario: Scenario, policies: Policies, rules: Rules) -> Outcome:
    """Run the policies in the scenario.

    Raises errors of the mechanism (`PolicyError` for a violation of the contract), and `StuckError`.
    """
    options = replace(scenario.options, num_replicas=rules.num_replicas, reserves_growth=rules.fast_forward)
    harness = Harness(
        policies.prioritizer,
        policies.replicaset_scheduler,
        policies.replica_scheduler,
        options,
        admission=policies.admission,
    )
    for replica_id in scenario.down:
        harness.replicaset.set_state(replica_id, ReplicaState.DOWN)
    watch = _Watch(detailed=rules.detailed)
    harness.controller.watch((watch,))
    simulator = harness.simulator(
        SimulationOptions(
            fast_forward=rules.fast_forward,
            check_every_steps=int(rules.check_every_step),
            policy_timeout_s=rules.policy_timeout_s,
        )
    )
    specs = requests_of(scenario, rules.num_replicas)
    stream = np.random.default_rng(11)
    for spec in specs[: scenario.num_aborted * rules.num_replicas]:
        simulator.abort_at(spec.arrived_at + float(stream.uniform(0.0, 0.4)), spec.request_id)
    simulator.run(specs)
    harness.controller.check_conservation()
    outcome = watch.outcome
    outcome.steps.sort(key=lambda step: step[:3])
    outcome.num_unfinished = harness.controller.num_alive
    return outcome


def requests_of(scenario: Scenario, num_replicas: int) -> list[RequestSpec]:
    """Return the scenario's requests in order of arrival; the same on every call."""
    return scenario.requests(np.random.default_rng(5), num_replicas)


Range = tuple[int, int]


def _spread(
    count: int, over_s: float, prompts: Range, outputs: Range, expires_s: float | None = None
) -> Callable[[np.random.Generator, int], list[RequestSpec]]:
    """Return a function that draws `count` requests per replica at uniform times, with random lengths, classes and
    SLOs.
    """

    def make(stream: np.random.Generator, num_replicas: int) -> list[RequestSpec]:
        total = count * num_replicas
        times = np.sort(stream.uniform(0.0, over_s, total))
        specs = []
        for index, arrived_at in enumerate(times.tolist()):
            has_slos = bool(stream.random() < 0.5)
            expires = expires_s is not None and bool(stream.random() < 0.5)
            specs.append(
                RequestSpec(
                    f"r{index}",
                    arrived_at,
                    int(stream.integers(*prompts, endpoint=True)),
                    int(stream.integers(*outputs, endpoint=True)),
                    priority=int(stream.integers(-1, 2)),
                    tenant=f"tenant{int(stream.integers(3))}",
                    slo_class=("batch", "interactive")[has_slos],
                    ttft_slo_s=0.5 if has_slos else None,
                    tpot_slo_s=0.05 if has_slos else None,
                    deadline_s=float(stream.uniform(0.2, 5.0)) if has_slos else None,
                    expires_after_s=expires_s if expires else None,
                )
            )
        return specs

    return make


def _long_and_short(stream: np.random.Generator, num_replicas: int) -> list[RequestSpec]:
    specs = _spread(12, 0.5, (10, 60), (2, 12))(stream, num_replicas)
    for index in range(0, len(specs), 6):
        specs[index] = replace(specs[index], num_prompt_tokens=1100 + 100 * (index % 4))
    return specs


def _all_at_once(stream: np.random.Generator, num_replicas: int) -> list[RequestSpec]:
    return [RequestSpec(f"r{index}", 0.0, 40, 6) for index in range(14 * num_replicas)]


def _with_shared_prefixes(stream: np.random.Generator, num_replicas: int) -> list[RequestSpec]:
    specs = []
    for spec in _spread(16, 0.6, (20, 90), (4, 24))(stream, num_replicas):
        prefix = int(stream.integers(3))
        content = PromptContent(((f"prefix{prefix}", 48), (spec.request_id, spec.num_prompt_tokens)))
        specs.append(replace(spec, num_prompt_tokens=content.num_tokens, content=content))
    return specs


def _of_programs(stream: np.random.Generator, num_replicas: int) -> list[RequestSpec]:
    """Return agent loops, and plans whose parallel tasks are joined.

    If a call is aborted, the calls that depend on it end, too.
    """
    specs: list[RequestSpec] = []
    starts = np.sort(stream.uniform(0.0, 0.4, 6 * num_replicas)).tolist()
    for number, start in enumerate(starts):
        calls = _loop(4) if number % 2 else _fork_and_join(3)
        prompts: list[PromptContent] = []
        for index, parents in enumerate(calls):
            name = f"p{number}.{index}"
            before = prompts[parents[0]].segments if parents else (("system", 32),)
            text = (name, int(stream.integers(8, 24)))
            answers = tuple((("out", f"p{number}.{parent}"), 6) for parent in parents)
            prompts.append(PromptContent((*before, *answers, text)))
            spec = RequestSpec(
                name,
                start,
                prompts[-1].num_tokens,
                6,
                content=prompts[-1],
                program_id=f"p{number}",
                stage="plan" if not parents else "work",
                parent_calls=tuple(f"p{number}.{parent}" for parent in parents),
                follows=follows_of([f"p{number}.{parent}" for parent in parents]),
                think_time_s=float(stream.exponential(0.05)) if parents else 0.0,
                num_program_calls=len(calls),
                is_last_call=index == len(calls) - 1,
                next_call_after_s=0.05 if index + 1 < len(calls) else None,
                program_slo_s=3.0,
            )
            specs.append(spec)
    return specs


def _loop(length: int) -> list[tuple[int, ...]]:
    """Return the indices of the parents of each call, for calls that follow one another."""
    return [() if index == 0 else (index - 1,) for index in range(length)]


def _fork_and_join(width: int) -> list[tuple[int, ...]]:
    """Return the indices of the parents of each call, for one call, `width` parallel ones, and one that joins these."""
    return [(), *((0,) for _ in range(width)), tuple(range(1, width + 1))]


def _with_adapters(
    make: Callable[[np.random.Generator, int], list[RequestSpec]],
) -> Callable[[np.random.Generator, int], list[RequestSpec]]:
    """Return a function that draws requests with `make`, and gives three of every four requests an adapter."""
    names = ("", *(one.name for one in _ADAPTERS))
    return lambda stream, num_replicas: [
        replace(spec, adapter=names[index % len(names)]) for index, spec in enumerate(make(stream, num_replicas))
    ]


class _InTurn:
    """Acceptance model: of n drafts, it accepts (number of the request's output tokens) mod (n + 1)."""

    max_tokens = None

    def num_accepted(self, request: Request, num_drafts: int) -> int:
        return request.num_output_tokens % (num_drafts + 1)

    def release(self, request: Request) -> None:
        """Do nothing, since no state is kept per request."""


_ADAPTERS = tuple(AdapterConfig(name=name, num_blocks=1, load_s=0.02) for name in ("a", "b", "c"))
LIGHT = Scenario("light load", SMALL, _spread(8, 6.0, (20, 300), (2, 16)), is_memory_ample=True)
OVERLOADED = Scenario(
    "far more requests than fit into a batch",
    replace(SMALL, num_blocks=128, max_batch_size=4, max_batch_tokens=64),
    _spread(20, 0.05, (16, 200), (2, 12)),
    is_memory_ample=True,
)
ALL_AT_ONCE = Scenario("equal requests, all at once", SMALL, _all_at_once, is_memory_ample=True)
LONG_AND_SHORT = Scenario("long and short prompts", replace(SMALL, num_blocks=160), _long_and_short)
STARVED = Scenario(
    "too little memory: decodes must be preempted",
    replace(SMALL, num_blocks=16, host_blocks=4),
    _spread(10, 0.3, (30, 120), (30, 60)),
)
INCREMENTAL = Scenario(
    "too little memory, taken chunk by chunk",
    replace(SMALL, num_blocks=20, max_batch_tokens=48, reserve_prompt=False, watermark_blocks=1),
    _spread(10, 0.3, (60, 200), (10, 40)),
)
SWAPPING = Scenario(
    "too little memory, and a host to swap to",
    replace(SMALL, num_blocks=16, host_blocks=40, bytes_per_block=4096),
    _spread(10, 0.3, (30, 120), (30, 60)),
)
LEAVING = Scenario(
    "requests are taken back and expire",
    replace(SMALL, num_blocks=24, max_batch_size=4),
    _spread(20, 0.6, (16, 120), (4, 40), expires_s=0.3),
    num_aborted=12,
)
SHARED_PREFIXES = Scenario(
    "shared prefixes in a small cache",
    replace(SMALL, num_blocks=24, prefix_cache=PrefixCacheOptions()),
    _with_shared_prefixes,
)
PROGRAMS = Scenario(
    "calls of programs, some of which are taken back",
    replace(SMALL, num_blocks=32, max_batch_size=4, prefix_cache=PrefixCacheOptions()),
    _of_programs,
    num_aborted=2,
)
PIPELINED = Scenario(
    "two pipeline stages",
    replace(
        SMALL, pipeline_stages=2, num_blocks=24, max_batch_tokens=64, latency=structs.replace(STEP_TIME, num_stages=2)
    ),
    _spread(12, 0.4, (16, 200), (4, 30)),
)
KV_PARALLEL = Scenario(
    "two KV-parallel groups",
    replace(SMALL, kv_parallel_groups=2, kv_group_tokens=320, num_blocks=60),
    _spread(10, 0.4, (40, 420), (4, 30)),
)
MORE_ADAPTERS = Scenario(
    "more adapters than slots",
    replace(SMALL, num_blocks=32, adapters=AdaptersConfig(max_loras=2, models=_ADAPTERS)),
    _with_adapters(_spread(12, 0.4, (16, 160), (4, 30))),
)
DRAFTS = Scenario(
    "decodes with drafts",
    replace(SMALL, num_blocks=24, drafts=DraftRules(num_tokens=3, max_tokens=4), acceptance=_InTurn()),
    _spread(12, 0.4, (16, 120), (4, 40)),
)
ONE_DOWN = Scenario("one replica takes no requests", SMALL, _spread(8, 0.5, (20, 100), (2, 12)), down=frozenset({1}))

SCENARIOS = (
    LIGHT,
    OVERLOADED,
    ALL_AT_ONCE,
    LONG_AND_SHORT,
    STARVED,
    INCREMENTAL,
    SWAPPING,
    LEAVING,
    SHARED_PREFIXES,
    PROGRAMS,
    PIPELINED,
    KV_PARALLEL,
    MORE_ADAPTERS,
    DRAFTS,
)
"""Scenarios that every policy is tested in."""
