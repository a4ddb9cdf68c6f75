"""Measure the cost of one steady decode step: schedule and apply, with prefix cache and priorities, without observers.

Figures are ratios to a bare loop that appends one token to each of as many lists, taken in the same run, alternately.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from msgspec import structs

from vajra_py.config import config_from_mapping
from vajra_py.contract import BatchBuilder, LocalReplicaView, ReplicaScheduler
from vajra_py.contract.latency import LatencyModel
from vajra_py.contract.observer import EndReason
from vajra_py.latency import AffineConfig
from vajra_py.plugins import OutputLengthInputs, build_output_lengths, load_registry
from vajra_py.runtime.kv import BlockHashes, PrivateBlockHashes, SegmentBlockHashes
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.runtime.serving.build import ModelFacts, Services, build_controller
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepResult
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.executor import SimulatedExecutor

STEPS = 300
ROUNDS = 7
PROMPT_TOKENS = 200
STEP_TICKS = 10**10
_NOTHING = StepResult()


@dataclass(frozen=True, slots=True)
class Case:
    """One situation to measure."""

    num_running: int
    num_waiting: int = 0
    admits: bool = False
    """True if every step admits one request, which ends with its prompt; else no request is admitted."""
    prioritizer: str = "edf"
    num_tenants: int = 1
    scheduler: str = "fixed_chunk"
    params: tuple[tuple[str, Any], ...] = (("chunk_size", 2048),)
    num_prefixes: int = 0
    """Prefixes of which each waiting prompt begins with one; 0: they share nothing."""


def affine_latency() -> LatencyModel:
    """Return a latency model of negligible cost."""
    return AffineConfig(type="affine", base_s=0.005, per_token_s=1e-5).build()


def build(case: Case) -> tuple[Controller, Replica, SimulatedExecutor]:
    """A replica that runs as many decodes as in the case, with as many more waiting behind a full batch."""
    mapping = {
        "version": 1,
        "scheduling": {
            "request_prioritizer": case.prioritizer,
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": {"policy": case.scheduler, "params": dict(case.params)},
        },
        "replica": {
            "max_batch_size": case.num_running + case.admits,
            "max_model_len": 1_000_000,
            "memory": {
                "num_blocks": max(case.num_running * 2_000, 80_000),
                "watermark_fraction": 0.0,
                "block_size": 16,
            },
        },
        "workload": {"type": "profile", "profile": "azure2023_conv"},
        "backend": {"simulator": {"latency": {"type": "affine", "base_s": 0.005, "per_token_s": 1e-5}}},
    }
    config = config_from_mapping(mapping)
    registry = load_registry()
    seeds = SeedTree(0)
    executor = SimulatedExecutor()
    services = Services(
        registry=registry,
        latency=affine_latency(),
        output_lengths=build_output_lengths("none", {}, OutputLengthInputs(seeds.stream, {}), registry),
        seeds=seeds,
        facts=ModelFacts(),
        executor_of=lambda replicaset, replica_id: executor,
    )
    controller = build_controller(config, services)
    replica = controller.replicas()[0]
    now = 0
    for number in range(case.num_running):
        tenant = f"tenant-{number % case.num_tenants}"
        facts = RequestFacts(f"run-{number}", PROMPT_TOKENS + number % 37, max_tokens=900_000, tenant=tenant)
        submit(controller, executor, facts, now)
    while len(replica.running_set.pool) < case.num_running:
        now += STEP_TICKS
        step(replica, now)
    num_outputs = 1 if case.admits else 100
    for number in range(case.num_waiting):
        tenant = f"tenant-{number % case.num_tenants}"
        facts = RequestFacts(f"wait-{number}", PROMPT_TOKENS + number % 1499, max_tokens=num_outputs, tenant=tenant)
        prefix = f"prefix-{number % case.num_prefixes}" if case.num_prefixes else ""
        submit(controller, executor, facts, now + number, prefix)
    return controller, replica, executor


def submit(
    controller: Controller, executor: SimulatedExecutor, facts: RequestFacts, now: int, prefix: str = ""
) -> None:
    """Submit one request that generates its maximum number of tokens, perhaps with a prefix that others have too."""
    replicaset = controller.replicaset_for(facts)
    segments = [(prefix, PROMPT_TOKENS), (facts.request_id, facts.num_prompt_tokens - PROMPT_TOKENS)]

    def hashes(block_size: int) -> BlockHashes:
        if not prefix:
            return PrivateBlockHashes(facts.request_id)
        return SegmentBlockHashes(segments, facts.request_id, block_size)

    request, _ = controller.submit(facts, replicaset, hashes, now)
    executor.expect(request, 900_000)


def step(replica: Replica, now: int) -> None:
    """Schedule and apply one step."""
    plan = replica.next_plan(now)
    if plan is None:
        raise RuntimeError("nothing ran")
    replica.complete_step(plan, _NOTHING, now + 1)


def bare_loop(num_lists: int) -> Callable[[int], None]:
    """The measure: append one token to each of so many lists, so many times."""
    lists: list[list[int]] = [[] for _ in range(num_lists)]

    def run(num_steps: int) -> None:
        for token in range(num_steps):
            for one in lists:
                one.append(token)

    return run


class OneByOne:
    """The fixed chunks of `fixed_chunk`, written with a loop over requests and no bulk call; declares nothing."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Every decode, then prompts up to the budget."""
        for request in replica.decodes():
            batch.add(request, 1)
        for request in (*replica.partial_prefills(), *itertools.islice(replica.waiting(), 10)):
            room = self._chunk_size - batch.num_tokens
            if room <= 0 or batch.add(request, min(batch.max_chunk(request), room)) is not None:
                return


def measure_case(case: Case, policy: ReplicaScheduler | None = None) -> tuple[float, float]:
    """(microseconds a step, multiple of the bare loop), each the median of several alternating rounds."""
    _, replica, _ = build(case)
    if policy is not None:
        replica.bind_policy(structs.replace(replica.parts, policy=policy))
    own, base = _alternating((stepping(replica), bare_loop(case.num_running)))
    return median(own) / 1000, _ratio(own, base)


def stepping(replica: Replica) -> Callable[[int], None]:
    """A function that forms and applies so many steps of the replica."""
    now = 10**15

    def run(num_steps: int) -> None:
        nonlocal now
        for _ in range(num_steps):
            now += STEP_TICKS
            step(replica, now)

    return run


def _alternating(loops: Sequence[Callable[[int], None]]) -> list[list[float]]:
    """Nanoseconds a step of each, in each of several rounds."""
    results: list[list[float]] = [[] for _ in loops]
    for _ in range(ROUNDS):
        for loop, result in zip(loops, results, strict=True):
            started = time.process_time_ns()
            loop(STEPS)
            result.append((time.process_time_ns() - started) / STEPS)
    return results


def _ratio(own: Sequence[float], base: Sequence[float]) -> float:
    return median(mine / theirs for mine, theirs in zip(own, base, strict=True))


def measure_queue(num_waiting: int, prioritizer: str = "edf", repeats: int = 400) -> tuple[float, float]:
    """(microseconds to add a request, microseconds to abort one) with so many waiting."""
    controller, _, executor = build(Case(4, num_waiting, False, prioritizer))
    now = 2 * 10**15
    added: list[str] = []
    started = time.process_time_ns()
    for number in range(repeats):
        request_id = f"late-{number}"
        facts = RequestFacts(request_id, PROMPT_TOKENS + number % 911, max_tokens=100)
        submit(controller, executor, facts, now + number)
        added.append(request_id)
    add_us = (time.process_time_ns() - started) / repeats / 1000
    victims = [f"wait-{number}" for number in range(0, num_waiting, max(1, num_waiting // repeats))][:repeats]
    started = time.process_time_ns()
    for request_id in victims:
        controller.abort(request_id, EndReason.ABORTED, now + 10**9)
    abort_us = (time.process_time_ns() - started) / len(victims) / 1000
    return add_us, abort_us


def measure() -> dict[str, float]:
    """Every figure, by name."""
    figures: dict[str, float] = {}
    for num_running in (32, 128, 256, 512, 1024):
        micros, ratio = measure_case(Case(num_running, params=(("chunk_size", 4096),)))
        figures[f"step_us_running_{num_running}"] = micros
        figures[f"step_x_bare_running_{num_running}"] = ratio
    figures["step_1024_x_256"] = figures["step_us_running_1024"] / figures["step_us_running_256"]
    for num_waiting in (1_000, 100_000):
        full, empty = _alternating([stepping(build(Case(256, waiting))[1]) for waiting in (num_waiting, 0)])
        figures[f"step_us_running_256_waiting_{num_waiting}"] = median(full) / 1000
        figures[f"step_waiting_{num_waiting}_x_empty"] = _ratio(full, empty)
    for key, admits in (("step_lrs_x_fcfs_waiting_100000", False), ("step_admitting_lrs_x_fcfs_waiting_100000", True)):
        fcfs, lrs = (measure_case(Case(256, 100_000, admits, name))[0] for name in ("fcfs", "lrs"))
        figures[key] = lrs / fcfs
        if admits:
            figures["step_us_admitting_fcfs_waiting_100000"] = fcfs
    cases = [Case(256, 10_000, True, name, num_tenants=1_000) for name in ("fcfs", "vtc")]
    fcfs_of_tenants, vtc = _alternating([stepping(build(case)[1]) for case in cases])
    figures["step_us_admitting_vtc_waiting_10000_of_1000_tenants"] = median(vtc) / 1000
    figures["step_admitting_vtc_x_fcfs_waiting_10000_of_1000_tenants"] = _ratio(vtc, fcfs_of_tenants)
    one_by_one, _ = measure_case(Case(256), OneByOne(2048))
    figures["step_us_one_by_one_running_256"] = one_by_one
    figures["step_one_by_one_x_bulk_running_256"] = one_by_one / figures["step_us_running_256"]
    micros, ratio = measure_case(Case(256, prioritizer="fcfs", scheduler="vllm_v1", params=()))
    figures["step_us_vllm_v1_running_256"] = micros
    figures["step_x_bare_vllm_v1_running_256"] = ratio
    few, many = measure_queue(100), measure_queue(100_000)
    figures["add_us_waiting_100"], figures["abort_us_waiting_100"] = few
    figures["add_us_waiting_100000"], figures["abort_us_waiting_100000"] = many
    figures["add_100000_x_100"] = many[0] / few[0]
    figures["abort_100000_x_100"] = many[1] / few[1]
    return figures
