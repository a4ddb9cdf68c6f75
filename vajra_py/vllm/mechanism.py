"""The mechanism behind a vLLM scheduler: a driver that advances in turns, and whose steps vLLM executes.

vLLM requests a step, executes it, and returns the tokens. A turn consists of all events at one tick between two steps:
the last step ends, requests arrive and are aborted, and the policy forms the next step. A simulator that receives the
same events at the same ticks makes the same decisions.

With asynchronous scheduling, vLLM requests a step before it returns the tokens of the last one. Only their number is
known: one for each request whose known tokens are all computed. So the turn ends the last step with tokens of unknown
identity. The ids of these tokens become known a turn later; if such a token stops its request, the request ends with
the step that is in flight then. With drafts, the number of tokens is unknown too. The next step therefore reserves room
for all drafts, and `Mechanism.accept` counts the accepted ones while that step is in flight.

The other modules of the scheduler, except `noted_connector`, use the runtime only through this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from vajra_py.config import PolicyChoice, ReplicaConfig, SystemConfig
from vajra_py.contract import Layer, ReplicaLimits
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.contract.policies import traits_of
from vajra_py.engine.refusals import check_pools, check_scaling
from vajra_py.errors import ConfigError, PolicyError, Problem, VajraError
from vajra_py.latency.models.unknown import NoPredictions
from vajra_py.latency.services.output_length import refuse_oracle
from vajra_py.plugins import OutputLengthInputs, Registry, build_latency_model, build_output_lengths
from vajra_py.plugins.watchdog import no_endless_calls
from vajra_py.runtime.kv import BlockHashes, KvMemory, KvRequest, Retention, TokenBlockHashes
from vajra_py.runtime.kv.block_hashes import adapter_salt, reads_cache
from vajra_py.runtime.kv.content_events import ContentEvents
from vajra_py.runtime.records.input_log import (
    Arrival,
    CacheReset,
    Gate,
    Input,
    PolicyChange,
    Stall,
)
from vajra_py.runtime.requests.adapters import AdapterLoad
from vajra_py.runtime.requests.connector import NOTHING, ConnectedKv, ConnectorRules, KvConnector, KvReport, Match
from vajra_py.runtime.requests.draft_inputs import Verification
from vajra_py.runtime.requests.kv_inputs import KvLook
from vajra_py.runtime.requests.request import Request, RequestFacts, RequestState
from vajra_py.runtime.serving.backend import Backend, BackendReplica, Transfer
from vajra_py.runtime.serving.build import ModelFacts, Services, build_controller
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.driver import Driver, DriverOptions
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import PlannedChunk, PlannedDrafts, StepPlan, StepResult
from vajra_py.runtime.support.clock import NEVER
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.vllm.noted_connector import NotedConnector, news_of

__all__ = [
    "NOTHING",
    "BlockHashes",
    "ConnectedKv",
    "ConnectorRules",
    "ContentEvents",
    "EndReason",
    "KvConnector",
    "KvMemory",
    "KvReport",
    "KvRequest",
    "MakeMemory",
    "Match",
    "Mechanism",
    "PlannedChunk",
    "PlannedDrafts",
    "Replica",
    "ReplicaConfig",
    "ReplicaLimits",
    "Request",
    "RequestFacts",
    "RequestState",
    "Retention",
    "StepPlan",
    "Submission",
    "TokenBlockHashes",
    "adapter_salt",
    "check_policies",
    "make_mechanism",
    "reads_cache",
]

TICKS_PER_NANOSECOND = 1000
Clock = Callable[[], int]
"""Function that returns the nanoseconds since the scheduler was created."""
MakeMemory = Callable[[ReplicaConfig, ReplicaLimits, Retention | None], KvMemory]
"""Function that builds the KV memory from settings, sizes, and the retention policy."""


@dataclass(eq=False, slots=True)
class Submission:
    """A request submitted to the mechanism, and its result.

    Attributes:
        prompt_token_ids: token ids from which block hashes are computed; None: the request does not use the prefix
            cache.
        hash_blocks: constructor of the hashes, with the arguments of `TokenBlockHashes`.
        reads_cache: True if the request may hit the prefix cache; its blocks are entered there in either case.
        on_ended: called when the request ends, for any reason.
        output: output tokens known so far, including those from before a resubmission.
        num_kept: number of output tokens at the time of submission.
        request: the mechanism's request, once created.
    """

    facts: RequestFacts
    arrived_at: float
    prompt_token_ids: Sequence[int] | None
    salt: str
    on_ended: Callable[[Request, EndReason], None]
    reads_cache: bool = True
    hash_blocks: Callable[..., BlockHashes] = TokenBlockHashes
    request: Request | None = None
    output: list[int] = field(default_factory=list)
    num_kept: int = 0

    def make_hashes(self, block_size: int) -> BlockHashes | None:
        """Return the hashes of the request's blocks; None if it is excluded from the prefix cache."""
        if self.prompt_token_ids is None:
            return None
        return self.hash_blocks(self.prompt_token_ids, block_size, self.salt, self.output, reads_cache=self.reads_cache)


@dataclass(slots=True)
class _Executor:
    """Executor for steps that vLLM executes: no output is known in advance; it only stores proposed draft tokens.

    Attributes:
        is_unseen: True if steps are formed before their drafts are known; the largest allowed number of drafts is then
            planned.
        newest: tokens proposed for requests whose output has not changed since.
        proposals: earlier proposals, for other requests, as pairs (number of the request's output tokens at the time of
            the proposal, proposed tokens).
    """

    is_unseen: bool = False
    newest: dict[Request, list[int]] = field(default_factory=dict)
    proposals: dict[Request, tuple[int, list[int]]] = field(default_factory=dict)

    def age(self, plan: StepPlan | None = None) -> None:
        """Move the newest proposals to `proposals`, but drop those for the decodes of `plan`, which get output now."""
        newest, self.newest = self.newest, {}
        drafted = None if plan is None else plan.drafted
        if drafted is not None and list(newest) == drafted.requests:
            return
        known = () if plan is None else set(plan.drafts)
        for request, tokens in newest.items():
            if request not in known:
                self.proposals[request] = request.num_output_tokens, tokens

    def proposed(self, request: Request) -> list[int]:
        """Return the tokens proposed last for a request; it must have a proposal."""
        tokens = self.newest.get(request)
        return self.proposals[request][1] if tokens is None else tokens

    def known_output_tokens(self, request: Request) -> int | None:
        """See `Executor`."""
        return None

    def num_drafts(self, requests: Sequence[Request], at_most: int) -> Sequence[int]:
        """See `Executor`."""
        if self.is_unseen:
            return [at_most] * len(requests)
        newest = self.newest_of(requests)
        if newest is None:
            return [min(len(self._valid(one)), at_most) for one in requests]
        counts = list(map(len, newest))
        return counts if max(counts, default=0) <= at_most else [min(count, at_most) for count in counts]

    def newest_of(self, requests: Sequence[Request]) -> list[list[int]] | None:
        """Return the newest proposals, by request, if they are for exactly these requests in this order; else None."""
        return list(self.newest.values()) if list(self.newest) == requests else None

    def _valid(self, request: Request) -> Sequence[int]:
        """Return the draft tokens proposed after the request's present output; none if its proposal is outdated or
        missing.
        """
        newest = self.newest.get(request)
        if newest is not None:
            return newest
        place, tokens = self.proposals.get(request, _NO_PROPOSAL)
        return tokens if place == request.num_output_tokens else ()

    def withheld_token(self, request: Request) -> StepResult:
        """See `Executor`."""
        return StepResult()

    def release(self, request: Request) -> None:
        """See `Executor`."""
        self.newest.pop(request, None)
        self.proposals.pop(request, None)


_NO_PROPOSAL: tuple[int, Sequence[int]] = (-1, ())


@dataclass(eq=False, slots=True)
class _VllmReplica(BackendReplica):
    """The only replica, and its step in flight."""

    plan: StepPlan | None = None
    stopped: set[Request] = field(default_factory=set)
    """Requests whose last token is known; they end with the step in flight."""
    accepted: dict[Request, int] = field(default_factory=dict)
    """Number of accepted drafts of each request in the step in flight; only for requests with accepted drafts."""
    is_known: bool = False
    """True if the tokens of the step in flight are known."""


class _GaveWay(Observer):
    """Collects requests that lost their KV blocks, by preemption (even in a step that ran nothing) or cache reset."""

    wants_step_ends = False

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_preempted(self, request: Any, mode: str, now: float) -> None:
        """See `Observer`."""
        self.names.append(request.request_id)

    def on_cache_reset(self, replicaset: str, replica_id: int, requests: Sequence[Any], now: float) -> None:
        """See `Observer`."""
        self.names += [request.request_id for request in requests]


class Mechanism(Backend[_VllmReplica]):
    """One replica, driven in turns. Not thread-safe."""

    def __init__(self, controller: Controller, clock: Clock, executor: _Executor) -> None:
        self.controller = controller
        self.replica = controller.only_replica()
        self.note: Callable[[Input], None] | None = None
        self._executor = executor
        self.fault: PolicyError | None = None
        """Contract violation because of which nothing is scheduled any more; None without one."""
        self._clock = clock
        self._one = _VllmReplica(self.replica)
        self._driver: Driver[_VllmReplica] = Driver(
            controller, self, (self._one,), DriverOptions(serves=True, isolates_policies=True), self._note
        )
        self._turn: int | None = None
        self.on_ended: Callable[[Request, EndReason, Submission], None] | None = None
        """Called at every end, after the submission's own callback."""
        self._refusal: VajraError | None = None
        """Error of a failed change of policies, after which the remaining layers are skipped."""
        self._arriving: list[Submission] = []
        self._submissions: dict[Request, Submission] = {}
        self._gave_way = _GaveWay()
        self._gate = Gate(0, self.replica.replicaset, self.replica.replica_id)
        self._is_gate_new = False
        self._ahead: StepPlan | None = None
        """The last step, if it has ended and its accepted drafts are not known yet; None otherwise."""
        self._leaving: set[Request] = set()
        """Requests that end with the open turn or with the step in flight, and hold KV blocks until then."""
        self._connected: ConnectedKv | None = None
        self.watch(())

    def use_connector(self, connector: KvConnector, rules: ConnectorRules) -> ConnectedKv:
        """Use a connector to load KV; its answers may change between any two steps. Call before the first request."""
        noted = (
            connector if self.note is None else NotedConnector(connector, self.replica, self._note, lambda: self.now)
        )
        self._connected = self.replica.use_connector(noted, rules)
        return self._connected

    def form_ahead(self) -> None:
        """Form steps before the tokens of the last one are known. Call before the first request."""
        self.set_gate(bars_preempted=True)
        self._executor.is_unseen = self.replica.limits.max_draft_tokens > 0

    def watch(self, observers: Sequence[Observer]) -> None:
        """Notify these observers of all events, in place of the observers of an earlier call. Call before the first
        request.
        """
        self.controller.watch([self._gave_way, *observers])

    def take_preempted(self) -> list[str]:
        """Return the requests that lost their KV blocks since the last call."""
        names = self._gave_way.names
        if names:
            self._gave_way.names = []
        return names

    @property
    def now(self) -> int:
        """The tick of the last turn."""
        return self._driver.now

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""
        return self._driver.num_steps

    @property
    def num_running(self) -> int:
        """Number of requests that hold KV blocks, except those that are about to end."""
        return self.replica.running_set.num_running - len(self._leaving)

    @property
    def kv_usage(self) -> float:
        """Fraction of all KV blocks (0 to 1) that requests hold, not counting requests that are about to end."""
        memory = self.replica.memory
        free = memory.free_blocks
        if self._leaving:
            free += memory.num_freed_by(self._leaving)
        return 1.0 - free / memory.num_blocks

    @property
    def plan(self) -> StepPlan | None:
        """The step in flight; None if there is none."""
        return self._one.plan

    def alive(self) -> Sequence[tuple[Request, Submission]]:
        """Return the requests that have not ended, each with its submission."""
        return [(request, self._submissions[request]) for request in self.controller.alive()]

    # Between steps

    def open_turn(self) -> int:
        """Open a turn unless one is open; return its tick, at which all events until the next step happen."""
        if self._turn is None:
            self._turn = max(self._clock() * TICKS_PER_NANOSECOND, self._driver.now + TICKS_PER_NANOSECOND)
            if self._is_gate_new:
                self._is_gate_new = False
                self._driver.events.push(self._turn, Phase.FAILURE, structs.replace(self._gate, tick=self._turn))
        return self._turn

    def set_gate(self, **changes: Any) -> None:
        """Change the gate from the open turn on or, if no turn is open, from the next turn on; see `Gate`."""
        self._gate = structs.replace(self._gate, **changes)
        if self._turn is None:
            self._is_gate_new = True
        else:
            self._driver.events.push(self._turn, Phase.FAILURE, structs.replace(self._gate, tick=self._turn))

    def arrive(self, submission: Submission) -> None:
        """Submit a request before the next step. As in vLLM, requests of a turn are ordered by arrival, then by id."""
        self.open_turn()
        self._arriving.append(submission)

    def abort(self, request_id: str) -> None:
        """Abort a request; if it holds blocks while a step is in flight, it ends when that step ends."""
        request = self.controller.find(request_id)
        is_held = request is not None and request.state is RequestState.RUNNING
        if is_held and self._one.plan is not None and self._turn is None and not self._is_gate_new:
            # The abort gets its own turn, before the turn of the step's end. The step's end then frees the blocks of
            # aborted requests before other blocks, as in vLLM.
            self._driver.advance_to(self.open_turn())
            self._turn = None
            self._driver.abort(request_id)
        else:
            self._driver.events.push(self.open_turn(), Phase.ABORT, request_id)
        if request is not None:
            self.leave(request)

    def leave(self, request: Request) -> None:
        """Record that the request, finished or aborted, ends with the open turn or with the step in flight."""
        if request.state is RequestState.RUNNING:
            self._leaving.add(request)

    def check_policies(self, choices: Mapping[Layer, PolicyChoice]) -> None:
        """Build these policies and discard them, to raise errors early."""
        policies = self.controller.replicasets[self.replica.replicaset].policies
        assert policies is not None
        for layer, choice in choices.items():
            policies.make(layer, choice)

    def change_policies(self, choices: Mapping[Layer, PolicyChoice]) -> None:
        """Replace the policies of these layers at once; no step may be in flight.

        Raises `VajraError` if a policy cannot be built.
        """
        tick, name = self.open_turn(), self.replica.replicaset
        # If the current scheduler needs slack, it is replaced before the prioritizer, which predicts slack. Otherwise
        # the prioritizer is replaced first, since the new scheduler may need slack.
        needs_slack = traits_of(self.replica.parts.policy).needs_slack
        order = sorted(choices, key=lambda layer: needs_slack and layer is not Layer.REPLICA_SCHEDULER)
        for layer in order:
            choice = choices[layer]
            self._driver.events.push(tick, Phase.POLICY, PolicyChange(name, layer, choice))
        self._refusal = None
        self.step()
        if self._refusal is not None:
            raise self._refusal
        self.fault = None

    def forget_cache(self) -> None:
        """Drop all KV before the next step is formed; requests that held blocks are recomputed."""
        tick, replica = self.open_turn(), self.replica
        self._driver.events.push(tick, Phase.FAILURE, CacheReset(tick, replica.replicaset, replica.replica_id))

    def condemn(self) -> None:
        """Report the policies as stalled in this turn if requests wait and nothing is scheduled."""
        tick = self.open_turn()
        self._driver.events.push(tick, Phase.FAILURE, Stall(tick, self.replica.replicaset))

    def stop(self, request: Request) -> None:
        """End a request whose last token is known. It ends with the step in flight.

        A request that is not part of the step in flight is aborted instead.
        """
        if self._one.plan is not None and self._one.plan.computes(request):
            self._one.stopped.add(request)
        elif request.state is not RequestState.ENDED:
            self.abort(request.request_id)
        self.leave(request)

    def accept(self, plan: StepPlan, num_drafts: Mapping[Request, int]) -> None:
        """Count accepted drafts as output of a step whose tokens are known now.

        The step is in flight, or was ended before its drafts were known. Does nothing if the step was cancelled.
        """
        one = self._one
        if plan is one.plan:
            one.accepted.update(num_drafts)
            one.is_known = True
        elif plan is self._ahead:
            self._ahead = None
            self._driver.advance_to(self.open_turn())
            if one.plan is not None:
                self._turn = None  # the step in flight must end in a later turn than this one
            if self.note is not None:
                counts = sorted((request.index, count) for request, count in num_drafts.items() if count)
                place = self.replica.replicaset, self.replica.replica_id
                self.note(Verification(self.now, *place, plan.step_index, counts))
            self._driver.verify(one, num_drafts)

    def propose(self, requests: Sequence[Request], proposals: Sequence[list[int]]) -> None:
        """Store the draft tokens proposed for the decodes among `requests`; no step may be in flight."""
        self._executor.age()
        pairs = zip(requests, proposals, strict=True)
        self._executor.newest = found = {one: tokens for one, tokens in pairs if tokens and one.is_skipped}
        if self.note is not None:
            for request, tokens in found.items():
                request.note_proposal(len(tokens))

    @property
    def is_ahead_of_drafts(self) -> bool:
        """True if steps are formed before the accepted drafts of the last one are known."""
        return self._executor.is_unseen

    def planned_drafts(self, plan: StepPlan) -> list[list[int]]:
        """Return the draft tokens for each entry of `plan.drafts` as read-only lists; -1 marks an unknown token."""
        places = [[-1] * count for count in range(self.replica.limits.max_draft_tokens + 1)]
        drafted, executor = plan.drafted, self._executor
        if executor.is_unseen:
            counts = [one.num_tokens for one in plan.drafts.values()] if drafted is None else drafted.num_drafts
            return [places[count] for count in counts]
        newest = None if drafted is None else executor.newest_of(drafted.requests)
        if drafted is not None and newest is not None:
            if list(map(len, newest)) == drafted.num_drafts:
                return newest
            pairs = zip(newest, drafted.num_drafts, strict=True)
            return [tokens if len(tokens) == count else tokens[:count] for tokens, count in pairs]
        found = []
        for request, (count, _, is_padding, _) in plan.drafts.items():
            tokens = places[count] if is_padding or not count else executor.proposed(request)
            found.append(tokens if len(tokens) == count else tokens[:count])
        return found

    def land(self, report: KvReport | None = None) -> None:
        """End the step in flight, whose tokens are all known, at the tick of this turn; `step` forms the next one.

        `report` is the report of a connector's workers, which may arrive although no step is in flight.
        """
        if self._one.plan is not None:
            self._driver.advance_to(self.open_turn())
            if report is not None:
                self._note(news_of(report, self.replica, self.now, self._one.plan.step_index))
            self._end_step(at_once=False, report=report)
        elif report is not None:
            self.take_report(report)

    def take_report(self, report: KvReport) -> None:
        """Apply a report of a connector's workers that came without a step, or with a step that ended earlier."""
        self._driver.advance_to(self.open_turn())
        if self._one.plan is not None:
            self._turn = None  # the step in flight must end in a later turn than this one
        self._note(news_of(report, self.replica, self.now, None))
        self._driver.take_report(self._one, report)

    def step(self) -> StepPlan | None:
        """Apply the remaining events of this turn, then form and return the next step; None if nothing runs."""
        one, heap = self._one, self._driver.events.heap
        if self._turn is not None and self._driver.now < self._turn and one.plan is None and not heap:
            self._turn = None  # the turn has only arrivals, so it is opened again, at the present tick
        tick = self.open_turn()
        self._turn = None
        self._arriving.sort(key=lambda submission: (submission.arrived_at, submission.facts.request_id))
        for submission in self._arriving:
            self._driver.events.push(tick, Phase.ARRIVAL, submission)
        self._arriving.clear()
        before = one.plan
        if before is not None:
            self._driver.events.push(tick, Phase.STEP_END, (one, None, one.epoch), one.rank)
        elif self._connected is not None:
            running_set = self.replica.running_set
            if running_set.num_running or running_set.may_admit:
                self._driver.events.push(
                    tick, Phase.FAILURE, KvLook(tick, self.replica.replicaset, self.replica.replica_id)
                )
        self._driver.events.bring_forward(tick)
        self._driver.run_until(tick)
        return None if one.plan is before else one.plan

    def _end_step(self, *, at_once: bool, report: KvReport | None = None) -> None:
        one = self._one
        plan, one.plan = one.plan, None
        assert plan is not None
        stopped = frozenset(each for each in one.stopped if each.state is RequestState.RUNNING)
        one.stopped.clear()
        accepted, one.accepted = one.accepted, {}
        is_ahead = self._executor.is_unseen and not one.is_known
        one.is_known = False
        if is_ahead:
            self._ahead = plan
        if self._executor.newest:
            # The step's output makes its requests' proposals useless, so `age` drops these proposals. With a connector,
            # `age` drops no proposal, because a failed load may prevent the output.
            self._executor.age(plan if self._connected is None else None)
        result = StepResult(stopped=stopped, accepted=accepted, report=report, is_ahead=is_ahead)
        self._driver.complete(one, plan, result, at_once=at_once)

    # Backend of the driver

    def launch(self, replica: _VllmReplica, plan: StepPlan) -> int:
        """See `Backend`."""
        replica.plan = plan
        return NEVER

    def cancel(self, replica: _VllmReplica) -> int:
        """See `Backend`; the result of the cancelled step will be ignored."""
        replica.plan = None
        replica.stopped.clear()
        replica.accepted.clear()
        replica.is_known = False
        return self._driver.now

    def on_arrival(self, payload: Submission) -> None:
        """See `Backend`."""
        now = self._driver.now
        if self.note is not None:
            tokens = None if payload.prompt_token_ids is None else tuple(payload.prompt_token_ids)
            salt, reads = payload.salt, payload.reads_cache
            self.note(Arrival(now, payload.arrived_at, payload.facts, None, tokens, salt=salt, reads_cache=reads))
        self._driver.submit(payload.facts, payload.make_hashes, payload, payload.arrived_at)

    def on_step_end(self, replica: _VllmReplica, payload: None) -> None:
        """See `Backend`."""
        self._end_step(at_once=True)

    def on_policy_change(self, payload: Any) -> None:
        """See `Backend`."""
        if self._refusal is not None:
            return
        try:
            self._driver.swap_policy(payload)
        except VajraError as error:
            self._refusal = error

    def on_submitted(self, request: Request, payload: Submission) -> None:
        """See `Backend`."""
        payload.request = request
        self._submissions[request] = payload

    def on_transfer(self, transfer: Transfer[_VllmReplica]) -> None:
        """See `Backend`; there is one replica."""
        raise RuntimeError("KV moves between replicas, of which there is one")

    def on_transfer_cancelled(self, transfer: Transfer[_VllmReplica]) -> None:
        """See `Backend`; there is one replica."""

    def on_adapter_load(self, replica: _VllmReplica, load: AdapterLoad) -> None:
        """See `Backend`; vLLM loads adapters by itself."""
        raise RuntimeError("this mechanism loads no adapter")

    def on_placed(self, request: Request, replicas: Sequence[_VllmReplica]) -> None:
        """See `Backend`."""

    def on_requests_ended(self, ended: Sequence[tuple[Request, EndReason]]) -> None:
        """See `Backend`."""
        for request, reason in ended:
            self._leaving.discard(request)
            submission = self._submissions.pop(request)
            submission.on_ended(request, reason)
            if self.on_ended is not None:
                self.on_ended(request, reason, submission)

    def on_isolated(self, replicaset: str, error: PolicyError) -> None:
        """See `Backend`."""
        self.fault = error

    def _note(self, entry: Input) -> None:
        if self.note is not None:
            self.note(entry)


def make_mechanism(
    config: SystemConfig,
    registry: Registry,
    clock: Clock,
    max_model_len: int,
    bytes_per_token: int,
    make_memory: MakeMemory | None = None,
) -> Mechanism:
    """Build the mechanism from settings that contain every size.

    `make_memory` builds the KV memory; None for this project's own memory. Raises `ConfigError` for more than one
    replica, a scaler, pools, an admission policy or an oracle of output lengths. Errors of building the policies are
    passed on.
    """
    replicasets = config.effective_replicasets
    problems = check_scaling("vllm", replicasets) + check_pools("vllm", replicasets)
    if problems:
        raise ConfigError(problems)
    if len(replicasets) != 1 or next(iter(replicasets.values())).num_replicas != 1:
        sizes = {name: one.num_replicas for name, one in replicasets.items()}
        message = f"a vLLM is one replica of one replicaset (got {sizes})"
        raise ConfigError(Problem("replicasets", message, "Allowed: one, with num_replicas: 1"))
    if config.admission_policy is not None:
        message = f"vLLM admits a request before its scheduler is called (got {config.admission_policy.policy!r})"
        advice = "Leave it out: an admission policy decides in a simulation, on the engine and in `vajra serve`"
        raise ConfigError(Problem("scheduling.admission", message, advice))
    settings = config.backend.settings
    seeds = SeedTree(config.seed).child("policies")
    latency = getattr(settings, "latency", None)
    lengths = getattr(settings, "output_length", None)
    if lengths is not None:
        refuse_oracle(lengths.type, f"backend.{config.backend.kind}.output_length")
    executor = _Executor()
    services = Services(
        registry=registry,
        latency=(
            NoPredictions(f"backend.{config.backend.kind}.latency")
            if latency is None
            else build_latency_model(latency.type, latency.params, registry)
        ),
        output_lengths=build_output_lengths(
            "none" if lengths is None else lengths.type,
            {} if lengths is None else lengths.params,
            OutputLengthInputs(seeds.child("output_lengths").stream, {}),
            registry,
        ),
        seeds=seeds,
        facts=ModelFacts(None, max_model_len, bytes_per_token),
        executor_of=lambda replicaset, replica_id: executor,
        make_memory=make_memory,
    )
    return Mechanism(build_controller(config, services), clock, executor)


def check_policies(config: SystemConfig, registry: Registry, max_model_len: int) -> None:
    """Call the policies with a dummy request. Raises `ConfigError` for a missing setting that only a call reveals."""
    mechanism = make_mechanism(config, registry, lambda: 0, max_model_len, 1)
    facts = RequestFacts(request_id="none", num_prompt_tokens=1, max_tokens=1)
    mechanism.arrive(Submission(facts, 0.0, None, "", lambda request, reason: None))
    with no_endless_calls(config.policy_timeout_s):
        mechanism.step()
    if mechanism.fault is not None and isinstance(mechanism.fault.__cause__, ConfigError):
        raise mechanism.fault.__cause__
