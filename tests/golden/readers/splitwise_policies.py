"""Policies of splitwise-sim, for comparison with its recorded runs alone.

A request is a prompt task and a token task. Batches of token tasks run on unchanged until a request that fits comes in, or one of
them is done. Quirks that are kept: who was left out too often goes first only while the queue's head was, since the queue is
not put in order again; a request's tasks wait together from its arrival on, where they run on one instance.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import Field

from tests.golden.readers.policies import BindsOnArrival
from vajra_policies.routers.splitwise_mixed_pool import MixedPool, MixedPoolConfig
from vajra_py.contract import (
    BatchBuilder,
    EndedStep,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)

Load = tuple[ReplicaId, int, int]
"""A replica, requests there, and pending tokens as placement counts them."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request's two tasks go, and the loads by which that was decided."""

    prompt_at: ReplicaId
    token_at: ReplicaId
    loads: Sequence[Load]
    memory: Sequence[int] = ()
    """Tokens that requests were given at each replica, where that is counted."""
    mixed: Sequence[ReplicaId] = ()
    """Replicas of the mixed pool after it."""


Seen = dict[str, Placed]
"""By request."""


class InstanceConfig(PolicyConfig):
    """Parameters of an instance."""

    max_batch_tokens: int = Field(ge=1, description="Most tokens in a batch; a token task counts one.")
    max_preemptions: int = Field(ge=0, description="Rounds left out after which a task goes first.")


@dataclass(eq=False, slots=True)
class Task:
    """One half of a request."""

    request: RequestView
    is_prompt: bool
    num_left_out: int = 0
    is_started: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that it adds to a batch."""
        return self.request.num_prompt_tokens if self.is_prompt else 1

    @property
    def memory(self) -> int:
        """Tokens of KV that it takes when it starts."""
        return self.request.num_prompt_tokens + 1 if self.is_prompt else self.request.max_tokens - 1

    @property
    def is_done(self) -> bool:
        """True once it has generated what it has to."""
        return self.request.num_output_tokens > 0 if self.is_prompt else self.request.end_reason is not None

    @property
    def num_steps_left(self) -> int:
        """Tokens that a token task has left to generate."""
        return self.request.max_tokens - self.request.num_output_tokens


def _queue_key(task: Task) -> tuple[int, float]:
    return task.num_left_out, task.request.arrived_at


class Instance:
    """One instance's batches."""

    def __init__(self, config: InstanceConfig, context: PolicyContext, seen: Seen) -> None:
        self._seen = seen
        self._max_size = context.limits.max_batch_size
        self._max_tokens = config.max_batch_tokens
        self._max_left_out = config.max_preemptions
        self._tasks: dict[RequestView, list[Task]] = {}
        """By request: its tasks here that are not done."""
        self._queue: list[Task] = []
        self._prompts: list[Task] = []
        self._left_out: list[Task] = []
        self._batch: list[Task] = []
        self._batch_tokens = 0
        self._steps_left = 0
        self._is_cut = False
        self._replica_id = -1
        self._came: dict[RequestView, int] = {}
        """Position of each request, or its KV, in the order in which they came."""
        self._num_came = 0

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Go on with the batch, or choose another."""
        self._replica_id = replica.replica_id
        new = [one for one in replica.waiting() if one not in self._tasks]
        for request in sorted(new, key=self._came.__getitem__):
            self._tasks[request] = []
            for is_prompt in self._kinds(request):
                self._arrive(Task(request, is_prompt))
        self._steps_left -= 1
        if self._steps_left <= 0 or self._is_cut:
            self._finish_tasks()
            self._choose(batch.free_blocks)
        for task in self._batch:
            self._run(task, batch, now)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Tasks are queued in the order in which they come to an instance."""
        for request in requests:
            self._note(request)

    def _note(self, request: RequestView) -> None:
        self._came[request] = self._num_came
        self._num_came += 1

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """The instance that has sent KV looks at its queue again when that has arrived."""
        self._note(request)
        has_room = len(self._batch) < self._max_size and self._batch_tokens < self._max_tokens
        if source == self._replica_id and has_room and not any(one.is_prompt for one in self._batch):
            self._is_cut = self._is_cut or bool(self._queue) or any(map(self._has_come_since, self._came))

    def _has_come_since(self, request: RequestView) -> bool:
        """True if a request's prompt waits here since the last step was formed."""
        placed = self._seen.get(request.request_id)
        is_here = placed is not None and placed.prompt_at == self._replica_id
        return is_here and request not in self._tasks and not request.num_output_tokens

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget them."""
        for request in requests:
            self._came.pop(request, None)

    def has_waiting(self, num_arriving: int) -> bool:
        """True if a task waits: of a request that has just come, one that was not in a batch yet, or one that was left out."""
        return bool(num_arriving > len([one for one in self._tasks if not one.is_resident]) or self._queue)

    def _kinds(self, request: RequestView) -> Sequence[bool]:
        """Tasks of a request that run here, prompts as True."""
        placed = self._seen[request.request_id]
        if placed.prompt_at == placed.token_at:
            return (True, False)
        return (not request.num_computed_tokens,)

    def _in_order(self) -> Iterator[Task]:
        """The first task of each request, in order of the requests' arrival."""
        return (self._tasks[one][0] for one in sorted(self._tasks, key=lambda one: one.arrived_at))

    def _arrive(self, task: Task) -> None:
        self._tasks[task.request].append(task)
        self._enqueue(task)
        if not self._batch or any(one.is_prompt for one in self._batch):
            return
        fits = len(self._batch) < self._max_size and self._batch_tokens + task.num_tokens <= self._max_tokens
        if fits or (task.is_prompt and task.num_tokens <= self._max_tokens):
            self._is_cut = True

    def _enqueue(self, task: Task) -> None:
        insort(self._queue, task, key=_queue_key)
        if task.is_prompt:
            self._prompts.append(task)

    def _finish_tasks(self) -> None:
        for task in [one for one in self._batch if one.is_done]:
            self._batch.remove(task)
            tasks = self._tasks[task.request]
            tasks.remove(task)
            if not tasks:
                del self._tasks[task.request]

    def _choose(self, free_blocks: int) -> None:
        """Who runs next: those left out too often, prompts, those left out, those that ran, the others."""
        chosen = _Choice(self._max_size, self._max_tokens, free_blocks)
        for task in self._queue:
            if task.num_left_out < self._max_left_out or chosen.is_full(task):
                break
            chosen.take(task)
        for task in self._prompts:
            if chosen.is_full(task) or not (chosen.has(task) or chosen.take(task)):
                break
        for task in [*self._left_out, *self._batch]:
            if chosen.is_full(task):
                break
            chosen.take(task)
        for task in self._in_order():
            if not chosen.has(task) and (chosen.is_full(task) or not chosen.take(task)):
                break
        before = self._batch
        for task in [one for one in before if one not in chosen.tasks]:
            self._enqueue(task)
            self._left_out.append(task)
        new = [one for one in chosen.tasks if one not in before]
        for task in new:
            for queue in (self._queue, self._prompts, self._left_out):
                if task in queue:
                    queue.remove(task)
        self._batch = [one for one in before if one in chosen.tasks] + new
        self._batch_tokens = chosen.num_tokens
        for task in self._in_order():
            if task not in self._batch:
                task.num_left_out += 1
        has_prompts = any(one.is_prompt for one in self._batch)
        self._steps_left = 1 if has_prompts else min((one.num_steps_left for one in self._batch), default=0)
        self._is_cut = False

    def _run(self, task: Task, batch: BatchBuilder, now: float) -> None:
        request = task.request
        to_hold = request.num_prompt_tokens + (1 if task.is_prompt else request.max_tokens)
        refusal = batch.add(request, task.num_tokens, reserve_tokens=to_hold)
        if refusal is not None:
            raise ValueError(f"the simulator has room: {refusal}")
        task.is_started = True
        if not task.is_prompt:
            batch.note(request, preemptions=task.num_left_out)


class _Choice:
    """A batch that is being chosen."""

    def __init__(self, max_size: int, max_tokens: int, memory_left: int) -> None:
        self.tasks: list[Task] = []
        self.num_tokens = 0
        self._max_size, self._max_tokens, self._memory_left = max_size, max_tokens, memory_left
        self._requests: set[RequestView] = set()

    def has(self, task: Task) -> bool:
        """True if a task of its request is in."""
        return task.request in self._requests

    def is_full(self, task: Task) -> bool:
        """True if it does not fit; the first always does."""
        too_many = bool(self.tasks) and self.num_tokens + task.num_tokens > self._max_tokens
        return len(self.tasks) == self._max_size or too_many

    def take(self, task: Task) -> bool:
        """Take a task in, unless one of its request is; False if its memory lacks."""
        if self.has(task):
            return True
        needed = 0 if task.is_started else task.memory
        if needed > self._memory_left:
            return False
        self._memory_left -= needed
        self.tasks.append(task)
        self._requests.add(task.request)
        self.num_tokens += task.num_tokens
        return True


class LendingRouter(MixedPool):
    """`splitwise_mixed_pool`; whether a queue is empty is known to the instance alone, whose tasks wait one by one."""

    def __init__(
        self, config: MixedPoolConfig, context: PolicyContext, seen: Seen, instances: Sequence[Instance]
    ) -> None:
        super().__init__(config, context)
        self._seen, self._instances = seen, instances

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """The instance of the prompt."""
        self._see(replicas)
        before = [self._scheduled.at[one.replica_id] for one in replicas]
        loads = [(number, len(one.here), one.pending) for number, one in enumerate(before)]
        memory = [one.memory for one in before]
        prompt_at = super().assign(request, replicas, now)
        placed = self._scheduled.placed[request]
        mixed = list(self._mixed)
        self._seen[request.request_id] = Placed(placed.prompt_at, placed.token_at, loads, memory, mixed)
        return prompt_at

    def _has_waiting(self, replica: ReplicaLoadView) -> bool:
        return self._instances[replica.replica_id].has_waiting(replica.num_waiting)


class RouterConfig(PolicyConfig):
    """Parameters of the placement."""

    scheduler: str = Field(description="Name of the scheduler there.")


class Router(BindsOnArrival):
    """Both instances of a request, when it arrives: the least loaded of each pool, the first of equals; or in turn."""

    def __init__(self, config: RouterConfig, seen: Seen) -> None:
        self._scheduler = config.scheduler
        self._index = 2 if config.scheduler in BY_TOKENS else 1
        self._seen = seen
        self._num_placed = 0
        self._pending: Counter[ReplicaId] = Counter()

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """The instance of the prompt."""
        loads = {
            one.replica_id: (one.replica_id, one.num_running + one.num_waiting, self._pending[one.replica_id])
            for one in replicas
        }
        prompt_at = self._chosen([loads[one.replica_id] for one in replicas if one.role != "decode"])
        token_at = prompt_at
        if any(one.role == "decode" for one in replicas):
            token_at = self._chosen([loads[one.replica_id] for one in replicas if one.role == "decode"])
        self._num_placed += 1
        self._seen[request.request_id] = Placed(prompt_at, token_at, list(loads.values()))
        if self._scheduler == "token_jsq":
            self._pending[prompt_at] += request.num_prompt_tokens + 1
        return prompt_at

    def _chosen(self, loads: Sequence[Load]) -> ReplicaId:
        if self._scheduler == "kv_round_robin":
            return loads[self._num_placed % len(loads)][0]
        return min(loads, key=lambda one: one[self._index])[0]

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """The instance of the tokens."""
        return self._seen[request.request_id].token_at

    def on_step_end(self, step: EndedStep) -> None:
        """Prompts that are done no longer count; they are subtracted also where they never were added."""
        for request in step.requests:
            if request.num_output_tokens == 1:
                self._pending[step.replica_id] -= request.num_prompt_tokens

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Nor do requests that are done."""
        for request in requests:
            self._pending[self._seen[request.request_id].token_at] -= 1


def specs(seen: Seen) -> Sequence[PolicySpec]:
    """The policies of one run; the router writes down what it saw."""
    instances: list[Instance] = []

    def instance(config: InstanceConfig, context: PolicyContext) -> Instance:
        instances.append(Instance(config, context, seen))
        return instances[-1]

    return [
        PolicySpec(
            name="splitwise_lending_router",
            layer=Layer.REPLICASET_SCHEDULER,
            config=MixedPoolConfig,
            build=lambda config, context: LendingRouter(config, context, seen, instances),
            summary="Placement of splitwise-sim with a mixed pool.",
        ),
        PolicySpec(
            name="splitwise_instance",
            layer=Layer.REPLICA_SCHEDULER,
            config=InstanceConfig,
            build=instance,
            summary="An instance of splitwise-sim.",
        ),
        PolicySpec(
            name="splitwise_router",
            layer=Layer.REPLICASET_SCHEDULER,
            config=RouterConfig,
            build=lambda config, context: Router(config, seen),
            summary="Placement of splitwise-sim.",
        ),
    ]


BY_TOKENS = ("token_jsq", "kv_token_jsq")
"""Schedulers that count load in tokens; the others count requests."""
