"""The router's decisions without network: any course of events leaves every request accounted for, and replays equal."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from tests.route.route_harness import REGISTRY, system
from vajra_policies.routing import BindsOnArrival
from vajra_py.config import system_from_mapping
from vajra_py.contract import Move, ReplicaLoadView, RequestView
from vajra_py.contract.observer import EndReason
from vajra_py.errors import ConfigError
from vajra_py.route.build import build_router
from vajra_py.route.client import read_figures
from vajra_py.route.core import AGAIN, NEVER, PROMPT, RouteCore, Submitted
from vajra_py.route.exchange import StreamScan, read_usage
from vajra_py.route.records import PLACEMENTS_FILE, PlacementLog
from vajra_py.route.session import RouteSession
from vajra_py.runtime.kv import TokenBlockHashes
from vajra_py.runtime.records.input_log import Arrival, CacheReport, Input
from vajra_py.runtime.records.json_lines import read_rows
from vajra_py.runtime.requests.listeners import listeners_among
from vajra_py.runtime.requests.request import Request, RequestFacts
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import TICKS_PER_SECOND

PROMPT_TOKENS = range(80)
PRECISE = {
    "replicaset_scheduler": {
        "policy": "endpoint_picker",
        "params": {
            "scorers": [
                {
                    "scorer": "prefix-cache-scorer",
                    "params": {"prefix_match_info_producer_name": "precise-prefix-cache-producer"},
                }
            ],
        },
    }
}
"""A router that asks what servers hold."""
ROUTERS: list[dict[str, Any]] = [
    {"scheduling": {"replicaset_scheduler": {"policy": "endpoint_picker"}}},
    {"scheduling": {"replicaset_scheduler": {"policy": "pull"}}},
    {
        "pools": {"a": {"num_replicas": 1, "role": "prefill"}, "b": {"num_replicas": 2, "role": "decode"}},
        "hand_off": "vllm-pd",
    },
    {"scheduling": {"admission": {"policy": "max_load", "params": {"max_requests": 2}}}},
    {"scheduling": PRECISE},
]
SMALL = {"max_batch_size": 2, "memory": {"num_blocks": 12, "block_size": 16}}
STEP = st.tuples(
    st.sampled_from(["arrive", "token", "end", "again", "abort", "lose", "restore", "report", "kv", "wait"]),
    st.integers(0, 7),
)


class World:
    """A router whose servers do what they are told."""

    def __init__(self, settings: dict[str, Any], folder: Path, inputs: list[Input] | None = None) -> None:
        pools = settings.get("pools")
        places = [{"url": "http://a", **({"pool": pool} if pools else {})} for pool in ("a", "b", "b")]
        if settings.get("scheduling") is PRECISE:
            places = [{**one, "kv_events": {"endpoint": "tcp://127.0.0.1:1"}} for one in places]
        route = {"tokenizer": "not read here"}
        config = system_from_mapping(system(places, route, replica=SMALL, **settings), registry=REGISTRY)
        self.controller = build_router(config, REGISTRY)
        self.inputs: list[Input] = []
        self.core = RouteCore(self.controller, 3, self.inputs.append, is_replay=inputs is not None)
        self.at: dict[Request, int] = {}
        self.ended: dict[str, EndReason] = {}
        self.core.on_send = lambda request, _, replica_id: self.at.__setitem__(request, replica_id)
        self.core.on_ended = self._note_end
        self.log = PlacementLog(folder / PLACEMENTS_FILE)
        self.controller.watch([self.log])
        self.num = 0

    def _note_end(self, request: Request, reason: EndReason) -> None:
        assert request.request_id not in self.ended
        self.ended[request.request_id] = reason
        self.at.pop(request, None)

    def happen(self, what: str, number: int) -> None:
        clock = self.core.now + TICKS_PER_SECOND // 100
        served = list(self.at)
        one = served[number % len(served)] if served else None
        if what == "arrive":
            tokens = tuple(PROMPT_TOKENS[: 20 * (1 + number % 4)])
            facts = RequestFacts(
                f"r{self.num}", len(tokens), 10, priority=number, expires_after_s=0.05 if number == 7 else None
            )
            self.num += 1
            self.core.advance(clock, (Phase.ARRIVAL, Submitted(Arrival(clock, clock / 10**12, facts, None, tokens))))
        elif what in ("lose", "restore"):
            if what == "restore":
                self.core.restore(clock, "default", number % 3)
            else:
                sent = None if number < 3 else [one.request_id for one in served[::2]]
                self.core.lose(clock, "default", number % 3, "gone", sent)
        elif what == "report":
            self.core.report(clock, "default", number % 3, (number, number // 2, number / 7))
        elif what == "kv":
            hashes = TokenBlockHashes(PROMPT_TOKENS, 16).block_hashes(0, 5)
            named = [one.hex() for one in hashes if isinstance(one, bytes)]
            is_change = number % 4 >= 2
            change = (named[: 1 + number % 3], named[number % 5 :]) if is_change else ((), ())
            report = CacheReport(0, "default", number % 3, *change, begins=number % 4 == 0, ends=number % 4 == 1)
            self.core.report_kv(clock, report)
        elif what == "wait":
            self.core.advance(min(self.core.next_due(), clock + TICKS_PER_SECOND))
        elif one is not None and what == "abort":
            self.core.advance(clock, (Phase.ABORT, one.request_id))
        elif one is not None:
            leaves = self.controller.replicasets["default"].replicas[self.at[one]].parts.role.value == "prefill"
            end = PROMPT if leaves and what != "again" else {"token": "", "end": "stop", "again": AGAIN}[what]
            del self.at[one]
            if end == "":
                self.at[one] = one.replica_id
            self.core.answer(clock, one, one.num_output_tokens + 1, end)

    def close(self) -> None:
        self.log.close()


@pytest.mark.parametrize("settings", ROUTERS, ids=["picker", "pull", "pools", "admission", "precise"])
@limits(max_examples=40)
@given(steps=st.lists(STEP, min_size=5, max_size=60))
def test_every_request_is_accounted_for_and_the_replay_decides_the_same(
    settings: dict[str, Any], steps: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        world = World(settings, Path(first))
        for what, number in steps:
            world.happen(what, number)
            world.controller.check_conservation()
        assert not world.controller.replicasets["default"].out_of_service
        for replica_id in range(3):
            world.core.restore(world.core.now, "default", replica_id)
            world.core.report(world.core.now, "default", replica_id, (0, 0, 0.0))  # there are no other requests
        for _ in range(1000):
            if not world.controller.num_alive:
                break
            world.happen("end" if world.at else "wait", 0)
        assert not world.controller.num_alive
        assert len(world.ended) == world.num
        world.close()
        again = World(settings, Path(second), world.inputs)
        by_tick: dict[int, list[Input]] = {}
        for one in world.inputs:
            by_tick.setdefault(one.tick, []).append(one)
        for tick, inputs in by_tick.items():
            again.core.at(tick, inputs)
        again.close()
        decided = [list(read_rows(Path(one) / PLACEMENTS_FILE)) for one in (first, second)]
        assert decided[0] == decided[1]
        assert again.ended == world.ended


def test_a_decode_that_fails_goes_on_at_another_server(tmp_path: Path) -> None:
    world = World(ROUTERS[2], tmp_path)
    world.happen("arrive", 0)
    (request,) = world.at
    decoded_at = []
    for _ in range(2):
        assert world.at[request] == 0
        world.happen("end", 0)  # of its prompt
        world.happen("wait", 0)
        decoded_at.append(world.at[request])
        world.happen("again", 0)
    assert sorted(decoded_at) == [1, 2]
    world.close()


def test_a_late_bound_request_waits_for_a_server_that_has_not_failed_it(tmp_path: Path) -> None:
    world = World(ROUTERS[1], tmp_path)
    for _ in range(6):
        world.happen("arrive", 0)
    first, *others = [request for request, replica_id in world.at.items() if replica_id == 0]
    for request in [first, *others]:
        world.core.answer(world.core.now, request, 0, AGAIN)
    replicas = world.controller.replicasets["default"].replicas
    assert [one.running_set.num_running for one in replicas] == [0, 2, 2]
    ending = next(request for request, replica_id in world.at.items() if replica_id == 1)
    world.core.answer(world.core.now, ending, 1, "stop")
    assert world.at[first] == 1
    for replica_id in (1, 2):
        world.core.lose(world.core.now, "default", replica_id, "gone")
    assert [one.running_set.num_running for one in replicas] == [2, 0, 0]
    world.close()


class Insists(BindsOnArrival):
    """Sends everything to the first server that it does not see down, also where it does not see it at all."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int:
        down = {one.replica_id for one in replicas if not one.is_up}
        return next(replica_id for replica_id in range(3) if replica_id not in down)


def test_a_scheduler_that_insists_on_a_server_gets_it_while_it_is_up(tmp_path: Path) -> None:
    world = World(ROUTERS[0], tmp_path)
    replicaset = world.controller.replicasets["default"]
    replicaset.bind_policy(Insists(), "insists")
    world.happen("arrive", 0)
    (request,) = world.at
    world.happen("again", 0)
    assert world.at[request] == 0
    world.core.lose(world.core.now, "default", 0, "gone", ())
    assert world.at[request] == 1
    assert not replicaset.out_of_service
    world.close()


class CountsRunning(BindsOnArrival):
    """Sends requests to the first server, and counts by its callbacks how many run."""

    num_placed = num_running = 0

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int:
        self.num_placed += 1
        return next(one.replica_id for one in replicas if one.is_up)

    def on_admission(self, request: RequestView, replica_id: int, now: float) -> None:
        self.num_running += 1

    def on_preemption(self, request: RequestView, replica_id: int, now: float) -> None:
        self.num_running -= 1


def test_policies_learn_that_a_request_is_sent_again(tmp_path: Path) -> None:
    world, policy = World(ROUTERS[0], tmp_path), CountsRunning()
    replicaset = world.controller.replicasets["default"]
    replicaset.bind_policy(policy, "counts_running")
    for remote in replicaset.replicas:
        remote.lifecycle.listeners = listeners_among([(policy, "counts_running")])
    world.happen("arrive", 0)
    world.happen("again", 0)
    assert policy.num_running == len(world.at) == 1
    world.core.lose(world.core.now, "default", next(iter(world.at.values())), "gone", ())
    assert policy.num_placed == 3
    assert policy.num_running == len(world.at) == 1
    world.close()


class MovesAll(Insists):
    """Asks that every request moves to the last server."""

    def __init__(self) -> None:
        self.placed: list[RequestView] = []

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int:
        self.placed.append(request)
        return 0

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> list[Move]:
        return [Move(one, 2) for one in self.placed if one.replica_id == 0]

    def on_wake(self, key: str, now: float) -> None:
        """Let `moves` be called."""


def test_what_a_server_computes_stays_there_and_what_waits_may_move(tmp_path: Path) -> None:
    world = World({"scheduling": {"replicaset_scheduler": {"policy": "llumnix"}}}, tmp_path)
    world.happen("arrive", 0)  # wakes llumnix later
    world.happen("end", 0)
    world.controller.replicasets["default"].bind_policy(MovesAll(), "moves_all")
    for _ in range(3):
        world.happen("arrive", 0)
    running = dict(world.at)
    assert list(running.values()) == [0, 0]
    for one in running:
        world.core.answer(world.core.now, one, 1)
    for _ in range(10):
        world.happen("wait", 0)
    assert {one: world.at[one] for one in running} == running
    assert [world.at[one] for one in world.at if one not in running] == [2]
    world.close()


@pytest.mark.parametrize("failure", ["again", "lose"])
@pytest.mark.parametrize("pools", [{}, ROUTERS[2]], ids=["alike", "pools"])
def test_a_program_goes_on_where_its_server_has_failed_it(failure: str, pools: dict[str, Any], tmp_path: Path) -> None:
    world = World({**pools, "scheduling": {"replicaset_scheduler": {"policy": "thunderagent"}}}, tmp_path)
    tokens = tuple(PROMPT_TOKENS[:20])
    facts = RequestFacts("r", len(tokens), 10, program_id="p")
    world.core.advance(1, (Phase.ARRIVAL, Submitted(Arrival(1, 0.0, facts, None, tokens))))
    (request,) = world.at
    if pools:
        world.happen("end", 0)  # of its prompt
        world.happen("wait", 0)
    before = world.at[request]
    world.happen(failure, before)
    if pools:
        world.happen("end", 0)
        world.happen("wait", 0)
    assert world.at[request] != before
    assert not world.controller.replicasets["default"].out_of_service
    world.close()


def test_servers_that_took_no_connection_cost_no_try(tmp_path: Path) -> None:
    world = World(ROUTERS[0], tmp_path)
    world.happen("arrive", 0)
    (request,) = world.at
    for _ in range(10):
        world.core.lose(world.core.now, "default", world.at[request], "refused", ())
        world.core.restore(world.core.now, "default", 0)
    for _ in range(3):
        world.core.lose(world.core.now, "default", world.at[request], "gone", (request.request_id,))
        for replica_id in range(3):
            world.core.restore(world.core.now, "default", replica_id)
    assert world.ended == {request.request_id: EndReason.FAILED}
    world.close()


def test_nothing_is_due_in_an_idle_router(tmp_path: Path) -> None:
    world = World(ROUTERS[0], tmp_path)
    assert world.core.next_due() == NEVER
    world.close()


@pytest.mark.parametrize("stated", ["Infinity", "1e400", "NaN", "-5", "true", "2.5", "1000000000000", '"7"', "null"])
def test_a_number_of_tokens_that_no_answer_can_have_counts_as_one(stated: str) -> None:
    answer = b'{"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": %s}}'
    assert read_usage(answer % stated.encode())[0] == 1
    assert read_usage(answer % b"7") == (7, "length")


def test_figures_are_read_under_the_names_of_each_server() -> None:
    vllm = 'vllm:num_requests_running{model_name="a b",engine="0"} 3.0\nvllm:num_requests_waiting 2\n'
    vllm += 'vllm:num_requests_running{engine="1"} 4.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n# HELP x\n'
    found = read_figures(vllm)
    assert found is not None
    assert (found.num_running, found.num_waiting, found.kv_fraction) == (7, 2, 0.25)
    sglang = read_figures("sglang:num_running_reqs 5\nsglang:num_queue_reqs 6\nsglang:token_usage 0.5\n")
    assert sglang is not None
    assert (sglang.num_running, sglang.num_waiting, sglang.kv_fraction) == (5, 6, 0.5)
    assert read_figures("") is None
    assert (
        read_figures("vllm:num_requests_running nan\nvllm:num_requests_running 1e99\nvllm:num_requests_running\n")
        is None
    )


@given(st.integers(1, 6), st.lists(st.integers(0, 400), max_size=8))
def test_a_stream_is_counted_however_it_is_cut(num_tokens: int, cuts: list[int]) -> None:
    events = [b'data: {"choices": [{"finish_reason": null}]}\n\n'] * (num_tokens - 1)
    whole = b"".join([*events, b'data: {"choices": [{"finish_reason": "length"}]}\n\n', b"data: [DONE]\n\n"])
    scan, begin = StreamScan(), 0
    for cut in (*sorted(one for one in cuts if one < len(whole)), len(whole)):
        if cut > begin:
            scan.feed(whole[begin:cut])
            begin = cut
    assert (scan.num_tokens, scan.end, scan.saw_end) == (num_tokens, "length", True)


def test_the_end_mark_within_a_text_ends_no_stream() -> None:
    text = b'data: {"choices": [{"text": "data: [DONE]", "finish_reason": null}]}\n\n'
    scan = StreamScan()
    scan.feed(text + b"data: {")
    assert not scan.saw_end
    scan.feed(b'"text": "')
    scan.feed(b'data: [DONE]"}\n\n')
    assert (scan.saw_end, scan.num_tokens) == (False, 2)
    scan.feed(b"data: [DONE]\n\n")
    assert (scan.saw_end, scan.num_tokens) == (True, 2)


def test_settings_of_a_pools_replicas_count() -> None:
    servers = [{"url": f"http://{pool}", "pool": pool} for pool in ("a", "b")]

    def session(memory: dict[str, Any]) -> RouteSession:
        pools = {"a": {"role": "prefill"}, "b": {"role": "decode", "replica": {"memory": memory}}}
        mapping = system(servers, pools=pools, hand_off="vllm-pd")
        return RouteSession(system_from_mapping(mapping, registry=REGISTRY), REGISTRY)

    assert session({"tenant_salt": True}).has_tenant_salt
    with pytest.raises(ConfigError, match=r"are configured at the servers \(got kv_parallel or host_blocks\)"):
        session({"host_blocks": 4})


def test_a_fault_of_a_server_is_no_answer() -> None:
    server = SimpleNamespace(has_answered=False)
    routed: Any = SimpleNamespace(request=object(), end=None, server=server)
    core, clock = SimpleNamespace(answer=lambda *_: None), SimpleNamespace(now=lambda: 0)
    session: Any = SimpleNamespace(core=core, _clock=clock, _set_timer=lambda: None)
    RouteSession.answer(session, routed, 1, PROMPT, "server 0 of prefill: it did not answer in time")
    assert not server.has_answered, "the next failed poll of a prefill server that hangs counts"
    RouteSession.answer(session, routed, 1, PROMPT)
    assert server.has_answered
