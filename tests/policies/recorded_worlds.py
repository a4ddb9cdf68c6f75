"""Small simulated worlds in which the rules of policies bite, and what is recorded of a run in one.

Requests are those of the conformance scenarios, with further facts; replicas are few and small, so that requests wait for them, are
preempted, and lose what they have cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.records import Record
from vajra_py.config import config_from_mapping
from vajra_py.contract import AdmissionDecision, CachedBlock, ProgramView, ReplicaState, RequestView
from vajra_py.contract.observer import EndReason, Observer, StepRecord, TierTransfer
from vajra_py.experiment.runs.backend import Run
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.decision_reader import step_row
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.testing import scenarios
from vajra_py.workload import RequestSpec, Workload

ADAPTERS = ("a", "b", "c")
TOOLS = ("search", "python")
DEEP = Mapping[str, Any]


@dataclass(frozen=True)
class World:
    """Requests, and the settings of the replicas that serve them."""

    requests: Callable[[], list[RequestSpec]]
    settings: DEEP = field(default_factory=dict)


def of_scenario(scenario: scenarios.Scenario, copies: int) -> Callable[[], list[RequestSpec]]:
    """Return the requests that the scenario has for so many replicas, with every fact that a policy may read."""
    return lambda: [_stated(index, one) for index, one in enumerate(scenarios.requests_of(scenario, copies))]


def _stated(index: int, spec: RequestSpec) -> RequestSpec:
    """Add facts by the number of the request."""
    is_call = bool(spec.program_id)
    return replace(
        spec,
        ttft_slo_s=None if index % 6 == 0 else spec.ttft_slo_s,
        tbt_slo_s=None if spec.tpot_slo_s is None else 0.02 + 0.01 * (index % 3),
        session_id=spec.program_id or f"s{index % 5}",
        priority=spec.priority if not is_call else index % 3 - 1,
        tenant=spec.tenant or f"tenant{index % 3}",
        adapter=("", *ADAPTERS)[index % 4],
        max_tokens=None if index % 4 == 3 else spec.num_output_tokens + 5 * (index % 7),
        metadata={"tool": TOOLS[index % 2], "agent_cost": 10 * (index % 5)} if is_call else {"tool": ""},
    )


def merged(first: DEEP, *others: DEEP) -> dict[str, Any]:
    """Return the first settings with those of the others over them, section by section; another `type` begins anew."""
    result = dict(first)
    for other in others:
        for key, value in other.items():
            old = result.get(key)
            goes_on = (
                isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("type") in (None, old.get("type"))
            )
            result[key] = merged(old, value) if goes_on else value
    return result


class _Log(Observer):
    """Digests everything that happens, in order; times are in ticks."""

    def __init__(self, *, every_step: bool) -> None:
        self.wants_steps = every_step
        self.wants_step_ends = False
        self.num_preemptions = 0
        self._total = hashlib.sha256()

    def _note(self, *row: object) -> None:
        self._total.update(repr(row).encode())

    @property
    def digest(self) -> str:
        return self._total.hexdigest()[:6]

    def on_admission_decision(self, request: RequestView, policy: str, decision: AdmissionDecision, now: float) -> None:
        self._note("gate", request.request_id, decision, to_ticks(now))

    def on_assigned(self, request: RequestView, replica_id: int | None, now: float) -> None:
        self._note("assigned", request.request_id, replica_id, to_ticks(now))

    def on_admitted(self, request: RequestView, replica_id: int, now: float) -> None:
        self._note("admitted", request.request_id, replica_id, request.num_cached_tokens, to_ticks(now))

    def on_preempted(self, request: RequestView, mode: str, now: float) -> None:
        self.num_preemptions += 1
        self._note("preempted", request.request_id, mode, to_ticks(now))

    def on_transfer(self, request: RequestView, source: int, target: int, num_tokens: int, now: float) -> None:
        self._note("transfer", request.request_id, source, target, num_tokens, to_ticks(now))

    def on_arrived(self, request: RequestView, source: int, target: int, now: float) -> None:
        self._note("arrived", request.request_id, source, target, to_ticks(now))

    def on_transfer_end(self, request: RequestView, source: int, target: int, failure: str, now: float) -> None:
        self._note("transfer ended", request.request_id, source, target, failure, to_ticks(now))

    def on_held(self, request: RequestView, replica_id: int, now: float) -> None:
        self._note("held", request.request_id, replica_id, to_ticks(now))

    def on_kv_released(self, request: RequestView, replica_id: int, now: float) -> None:
        self._note("released", request.request_id, replica_id, to_ticks(now))

    def on_tier_hit(
        self, request: RequestView, replica_id: int, num_tokens: Mapping[str, int], load_s: float, now: float
    ) -> None:
        self._note("loaded", request.request_id, replica_id, list(num_tokens.items()), to_ticks(load_s), to_ticks(now))

    def on_tier_transfer(self, transfer: TierTransfer, now: float) -> None:
        place = (transfer.replica_id, transfer.source, transfer.target, transfer.num_blocks)
        self._note("copied", *place, to_ticks(transfer.started_at), to_ticks(now))

    def on_stayed(self, request: RequestView, replica_id: int, now: float) -> None:
        self._note("stayed", request.request_id, replica_id, to_ticks(now))

    def on_moved(self, request: RequestView, source: int | None, target: int | None, reason: str, now: float) -> None:
        self._note("moved", request.request_id, source, target, reason, to_ticks(now))

    def on_migration_begun(self, request: RequestView, source: int, target: int, reason: str, now: float) -> None:
        self._note("migrates", request.request_id, source, target, reason, to_ticks(now))

    def on_migration_aborted(self, request: RequestView, source: int, target: int, reason: str, now: float) -> None:
        self._note("migration aborted", request.request_id, source, target, reason, to_ticks(now))

    def on_replica_state(self, replicaset: str, replica_id: int, state: ReplicaState, now: float) -> None:
        self._note("state", replica_id, state.name, to_ticks(now))

    def on_pinned(
        self, replicaset: str, replica_id: int, name: str, request: RequestView, until: float, now: float
    ) -> None:
        self._note("pinned", replica_id, name, request.request_id, repr(until), to_ticks(now))

    def on_unpinned(self, replicaset: str, replica_id: int, name: str, why: Any, now: float) -> None:
        self._note("unpinned", replica_id, name, why.name, to_ticks(now))

    def on_evicted(self, replicaset: str, replica_id: int, block: CachedBlock, now: float) -> None:
        self._note("evicted", replica_id, block.request.request_id, block.depth, block.num_uses, to_ticks(now))

    def on_program_end(self, program: ProgramView, now: float) -> None:
        self._note("program", program.program_id, to_ticks(now))

    def on_step_begin(self, step: StepRecord) -> None:
        row = step_row(step)
        notes = row.pop("notes", {})
        row["formed_at"] = to_ticks(step.formed_at)
        self._note("step", list(row.items()), _rounded(notes))

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        times = [to_ticks(one) for one in token_times(request).tolist()]
        drafts = (request.num_draft_tokens, request.num_accepted_tokens)
        self._note("ended", request.request_id, reason.name, detail, to_ticks(now), times, drafts)


def _rounded(notes: Mapping[str, Mapping[str, float | int | str]]) -> list[object]:
    """Figures of a policy for people to read: the last digits may differ between machines."""
    return [
        (name, [(key, f"{value:.6g}" if isinstance(value, float) else value) for key, value in figures.items()])
        for name, figures in notes.items()
    ]


BASE: DEEP = {
    "version": 1,
    "backend": {
        "simulator": {
            "latency": {
                "type": "affine",
                "base_s": 0.004,
                "per_token_s": 0.0002,
                "per_prefill_pair_s": 2e-7,
                "per_decode_context_token_s": 1e-6,
            },
            "output_length": {"type": "noisy_oracle", "sigma": 0.5},
        }
    },
    "workload": {
        "type": "synthetic",
        "arrivals": {"type": "at_once"},
        "num_requests": 1,
        "prompt_tokens": {"type": "constant", "value": 1},
        "output_tokens": {"type": "constant", "value": 1},
    },
}
"""Steps whose time is a sum of products; lengths of outputs are known with errors."""
PLAIN: DEEP = {
    "scheduling": {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "least_loaded",
        "replica_scheduler": "vllm_v1",
    },
    "replica": {
        "max_batch_size": 6,
        "max_batch_tokens": 96,
        "max_model_len": 2000,
        "memory": {"num_blocks": 40, "host_blocks": 12},
    },
}
"""Plain policies, and replicas that compute at most six requests and 96 tokens in a step."""


def record(settings: DEEP, requests: Sequence[RequestSpec], *, every_step: bool = True) -> Record:
    """Simulate to the end. With `every_step` each one is formed by itself and noted; else decodes may be worked out in runs.

    Raises what the run raises, and `AssertionError` where requests are left.
    """
    registry = load_registry()
    config = config_from_mapping(merged(BASE, settings), registry=registry)
    if all(one.replica.adapters is None for one in config.effective_replicasets.values()):
        requests = [replace(one, adapter="") for one in requests]
    run = SimulatedRun(Run(config, registry, Workload.from_requests(list(requests)), SeedTree(7)))
    log = _Log(every_step=every_step)
    run.controller.watch((log,))
    outcome = run.start()
    run.controller.check_conservation()
    assert run.controller.num_alive == 0
    return Record(log.digest, outcome.num_steps, log.num_preemptions, round(outcome.ended_at, 2))
