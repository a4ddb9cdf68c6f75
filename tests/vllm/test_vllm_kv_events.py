"""KV cache events beside vLLM's own; the random sessions of `test_vllm_fuzz` compare them too."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import zmq
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from tests.vllm.core import Core, RequestScript, make_scheduler, vllm_config
from vajra_py.vllm import Scheduler

SCRIPTS = [
    RequestScript("r-0", tuple(range(20, 60)), 20, 0),
    RequestScript("r-1", tuple(range(20, 60)), 3, 1, salt="of-one-tenant"),
    RequestScript("r-2", tuple(range(20, 60)), 3, 2),
    RequestScript("r-3", tuple(range(200, 290)), 30, 4),
]


def config_of(model: str, **events: Any) -> Any:
    return vllm_config(
        model, max_model_len=256, kv_events_config=KVEventsConfig(enable_kv_cache_events=True, **events)
    )


def published(cls: type[Any], model: str) -> list[Any]:
    """The events that a subscriber of vLLM's publisher gets, as it decodes them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    config = config_of(model, publisher="zmq", endpoint=endpoint.replace("127.0.0.1", "*"), topic="kv")
    scheduler = make_scheduler(cls, config, 17, 8)
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv")
    subscriber.connect(endpoint)
    events: list[Any] = []
    try:
        assert scheduler.get_kv_event_publisher_config() is not None
        core = Core(scheduler)
        while not subscriber.poll(20):  # until the subscription is in force
            core.run([RequestScript(f"warm-{len(core.scripts)}", (9,) * 8, 1, 0)], 8, caches=True)
        core.run(SCRIPTS, 8, caches=True)
        assert scheduler.reset_prefix_cache()
        core.run([RequestScript("last-0", (5,) * 8, 1, 0)], 8, caches=True)
        while not events or list(getattr(events[-1], "token_ids", ())) != [5] * 8:
            assert subscriber.poll(10_000)
            _, _, payload = subscriber.recv_multipart()
            events += msgspec.msgpack.decode(payload, type=KVEventBatch).events
            events = [one for one in events if list(getattr(one, "token_ids", ())) != [9] * 8]
    finally:
        scheduler.shutdown()
        subscriber.close(linger=0)
    return events


def test_a_router_is_told_what_vllms_own_scheduler_tells(tiny_model: str) -> None:
    own, ours = (published(cls, tiny_model) for cls in (VllmScheduler, Scheduler))
    assert sorted(map(repr, ours)) == sorted(map(repr, own))
    assert {type(one).__name__ for one in ours} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
