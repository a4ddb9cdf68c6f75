"""LoRA adapters: slots are never exceeded, nobody waits for ever, and content of different adapters is never shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.config.replica import ReplicaConfig
from vajra_py.contract import (
    BatchBuilder,
    KeyMotion,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicySpec,
    ReplicaLoadView,
    RequestView,
    RetentionSpec,
)
from vajra_py.contract.observer import EndReason, Observer, StepRecord
from vajra_py.engine.refusals import check_replica
from vajra_py.errors import ConfigError
from vajra_py.runtime.records.input_log import Failure, Restart
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.testing.simulated import simulated_system
from vajra_py.workload import PromptContent, RequestSpec


class Unused:
    key_motion = KeyMotion.STATIC

    def key(self, block: Any, now: float) -> float:
        return 0.0


UNUSED = RetentionSpec("unused", PolicyConfig, lambda config, context: Unused(), "For this test.")


class Watch(Observer):
    """When requests were admitted and why they ended; checks the slots at every step."""

    wants_steps = True

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.admitted_at: dict[str, float] = {}
        self.hits: dict[str, int] = {}
        self.ends: dict[str, tuple[EndReason, str]] = {}
        self.most_adapters = 0

    def on_admitted(self, request: RequestView, replica_id: int, now: float) -> None:
        self.admitted_at.setdefault(request.request_id, now)

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        self.ends[request.request_id] = reason, detail
        self.hits[request.request_id] = request.num_cached_tokens

    def on_step_begin(self, step: StepRecord) -> None:
        names = {chunk.request.adapter for chunk in step.chunks} - {""}
        self.most_adapters = max(self.most_adapters, len(names))
        for replica in self._controller.replicas():
            assert replica.adapters is not None
            replica.adapters.check()


def asked(
    name: str, at: float, adapter: str, prompt: str = "", num_tokens: int = 32, num_output: int = 3
) -> RequestSpec:
    content = PromptContent(((prompt or name, num_tokens),))
    return RequestSpec(name, at, num_tokens, num_output, content=content, adapter=adapter)


def served(
    requests: Sequence[RequestSpec],
    max_loras: int,
    load_s: float | None = 0.0,
    scheduler: str = "vllm_v1",
    lost_at: tuple[float, float] | None = None,
    **changes: Any,
) -> Watch:
    """`lost_at`: when the first replica fails and when it comes back, seconds."""
    models = None if load_s is None else [{"name": name, "load_s": load_s, "num_blocks": 2} for name in "abcd"]
    replica = {
        "max_batch_size": 4,
        "max_batch_tokens": 64,
        "memory": {"num_blocks": 40, "watermark_fraction": 0.0, **changes.pop("memory", {})},
        "adapters": {"max_loras": max_loras, "models": models},
    }
    spec = changes.pop("spec", UNUSED)
    scheduling = {"replica_scheduler": {"policy": scheduler}}
    if spec is not UNUSED:
        scheduling[spec.layer.value] = {"policy": spec.name}
    controller, simulator = simulated_system(spec, scheduling, {"replica": replica, **changes})
    watch = Watch(controller)
    controller.watch([watch])
    if lost_at is not None:
        failure, restart = map(to_ticks, lost_at)
        simulator.inject(failure, Phase.FAILURE, Failure(failure, "default", 0, "test", max_reruns=0))
        simulator.inject(restart, Phase.FAILURE, Restart(restart, "default", 0))
    simulator.run(list(requests))
    controller.check_conservation()
    assert controller.num_alive == 0
    for replica_ in controller.replicas():
        assert replica_.adapters is not None
        assert not replica_.adapters.is_loading()
    return watch


def test_a_request_whose_adapter_finds_no_slot_is_skipped_and_others_go_on() -> None:
    """As in vLLM: it does not stop those behind it, and requests of the base model are never skipped."""
    watch = served([asked("1", 0.0, "a"), asked("2", 0.0, "b"), asked("3", 0.0, "a"), asked("4", 0.0, "")], max_loras=1)
    at = watch.admitted_at
    assert at["1"] == at["3"] < at["2"]
    assert at["4"] < at["2"]
    assert watch.most_adapters == 1
    both = served([asked("1", 0.0, "a"), asked("2", 0.0, "b")], max_loras=2)
    assert both.most_adapters == 2
    assert both.admitted_at["1"] == both.admitted_at["2"]


def test_a_load_takes_its_time_beside_computing() -> None:
    watch = served([asked("1", 0.0, "a"), asked("2", 0.0, ""), asked("3", 9.0, "a")], max_loras=1, load_s=5.0)
    assert watch.admitted_at["1"] == pytest.approx(5.0)
    assert watch.admitted_at["2"] == 0.0
    assert watch.admitted_at["3"] == 9.0  # it is still there


def test_the_least_recently_used_adapter_gives_way() -> None:
    requests = [asked(str(at), at * 10.0, name) for at, name in enumerate("abacab")]
    watch = served(requests, max_loras=2, load_s=1.0)
    waits = [watch.admitted_at[one.request_id] - one.arrived_at for one in requests]
    assert waits == pytest.approx([1, 1, 0, 1, 0, 1])  # c takes the place of b, a stays


def test_a_lost_replica_has_lost_its_adapters() -> None:
    """One is in use then, and another one on its way."""
    requests = [asked("1", 0.0, "a", num_output=2000), asked("2", 5.5, "b"), asked("3", 8.0, "a")]
    watch = served(requests, max_loras=2, load_s=5.0, lost_at=(6.0, 7.0))
    assert watch.ends["1"][0] is EndReason.FAILED
    assert watch.admitted_at["2"] == pytest.approx(12.0)
    assert watch.admitted_at["3"] == pytest.approx(13.0)


def test_adapters_that_a_server_keeps_itself_are_slots_alone() -> None:
    """`models: null`, as under vLLM: any name, no load, no memory, and nothing is kept for one who is not admitted."""
    names = ["x", "y", "", "x", "y", "z"]
    requests = [asked(str(k), 0.001 * k, name, num_output=3 + k) for k, name in enumerate(names)]
    watch = served(requests, max_loras=2, load_s=None)
    assert {reason for reason, _ in watch.ends.values()} == {EndReason.STOP}
    assert watch.most_adapters == 2
    assert watch.admitted_at["3"] < watch.admitted_at["5"] < 1.0


def test_content_of_different_adapters_is_not_shared() -> None:
    names = ["", "a", "b", "a"]
    watch = served([asked(str(k), 9.0 * k, name, "same", 64) for k, name in enumerate(names)], max_loras=2)
    assert [watch.hits[str(k)] for k in range(4)] == [0, 0, 0, 48]


def test_an_unknown_adapter_is_rejected_by_name() -> None:
    watch = served([asked("1", 0.0, "e"), asked("2", 0.0, "a")], max_loras=1)
    assert watch.ends["1"] == (EndReason.REJECTED, "no replica has its adapter ('e')")
    assert watch.ends["2"][0] is EndReason.STOP


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        (
            {"max_loras": 20, "models": [{"name": "a", "num_blocks": 2}]},
            "the slots leave no KV block (they take 40 of 40)",
        ),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "two adapters have one name (a)"),
        (
            {"models": [{"name": "a", "load_s": -1.0}]},
            "replica.adapters.models.0.load_s: must be at least 0 (got -1.0)",
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused(adapters: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        simulated_system(UNUSED, {}, {"replica": {"memory": {"num_blocks": 40}, "adapters": adapters}})
    assert said in str(refused.value)


def test_slots_take_the_place_of_kv_blocks() -> None:
    controller, _ = simulated_system(
        UNUSED,
        {},
        {
            "replica": {
                "memory": {"num_blocks": 40},
                "adapters": {"max_loras": 3, "models": [{"name": "a", "num_blocks": 2}]},
            }
        },
    )
    assert [one.limits.num_blocks for one in controller.replicas()] == [34]


class Affine:
    """Replicas that have a request's adapter, by the views; else the first with a slot."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, list[tuple[Any, ...]]]] = []

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int:
        views = [(tuple(one.loaded_adapters), tuple(one.waiting_adapters), one.num_adapter_slots) for one in replicas]
        self.seen.append((now, views))
        assert {one.max_loras for one in replicas} == {2}
        having = [one for one in replicas if request.adapter in (*one.loaded_adapters, *one.waiting_adapters)]
        return (having or [one for one in replicas if one.num_adapter_slots] or replicas)[0].replica_id

    def pull(self, replica: ReplicaLoadView, queued: Any, now: float) -> Sequence[str]:
        return ()


@pytest.mark.parametrize("interval_s", [0.0, 2.0])
def test_a_router_sees_what_is_loaded_and_what_waits(interval_s: float) -> None:
    """Also late, where views are polled."""
    router = Affine()
    spec = PolicySpec("affine", Layer.REPLICASET_SCHEDULER, PolicyConfig, lambda config, context: router, "A test.")
    requests = [asked("1", 0.0, "a"), asked("2", 1.0, "a"), asked("3", 6.0, "b"), asked("4", 7.0, "c")]
    watch = served([*requests, asked("5", 20.0, "b")], 2, 5.0, num_replicas=2, spec=spec, view_interval_s=interval_s)
    assert {reason for reason, _ in watch.ends.values()} == {EndReason.STOP}
    nothing: Any = ((), (), 2)
    late: Any = nothing if interval_s else ((), ("a",), 1)
    assert [views[0] for _, views in router.seen] == [
        nothing,
        late,
        (("a",), (), 2),
        (("a",), (), 2) if interval_s else (("a",), ("b",), 1),
        (("b", "c"), (), 2),
    ]


class Looks:
    """Everybody runs who can; keeps what it sees of adapters."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, tuple[str, ...], int]] = []

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        self.seen.append((now, tuple(replica.loaded_adapters), replica.num_adapter_slots))
        batch.add_running()
        for request in list(replica.waiting()):
            batch.add(request, batch.max_chunk(request))


def test_a_replica_scheduler_sees_what_is_loaded_and_which_slots_are_free() -> None:
    policy = Looks()
    spec = PolicySpec("looks", Layer.REPLICA_SCHEDULER, PolicyConfig, lambda config, context: policy, "A test.")
    requests = [asked("1", 0.0, "a", num_output=1), asked("2", 9.0, ""), asked("3", 10.0, "b", num_output=1)]
    served(requests, 2, 5.0, spec=spec)
    seen = {now: what for now, *what in policy.seen}
    assert seen[0.0] == [(), 2]
    assert seen[5.0] == [("a",), 1]  # only a waiting request needs it
    assert seen[9.0] == [("a",), 2]
    assert seen[15.0] == [("a", "b"), 1]


def test_workers_that_compute_the_base_model_alone_refuse_adapters_by_name() -> None:
    system = {"replica": {"memory": {"num_blocks": 40}, "adapters": {"models": [{"name": "a"}]}}}
    (problem,) = check_replica("system.replica", ReplicaConfig.model_validate(system["replica"]))
    assert str(problem).startswith("system.replica.adapters: steps are computed with the base model only")


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.integers(1, 90), st.integers(1, 40), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    ),
    max_loras=st.integers(1, 3),
    load_s=st.sampled_from([0.0, 0.001, 0.3, None]),
    scheduler=st.sampled_from(["vllm_v1", "fixed_chunk", "preemptive"]),
    router=st.sampled_from(["round_robin", "pull"]),
    reservation=st.sampled_from(["prompt", "incremental"]),
)
def test_nobody_waits_for_ever_and_slots_are_never_exceeded(
    arrivals: list[tuple[str, int, int, int]],
    max_loras: int,
    load_s: float | None,
    scheduler: str,
    router: str,
    reservation: str,
) -> None:
    """With so little memory that requests are preempted."""
    requests = [
        asked(str(k), 0.05 * at, name, num_tokens=prompt, num_output=output)
        for k, (name, prompt, output, at) in enumerate(sorted(arrivals, key=lambda one: one[3]))
    ]
    memory = {"num_blocks": 10 + 2 * max_loras, "reservation": reservation}
    watch = served(requests, max_loras, load_s, scheduler, memory=memory, num_replicas=2)
    assert {reason for reason, _ in watch.ends.values()} == {EndReason.STOP}
    assert watch.most_adapters <= max_loras
