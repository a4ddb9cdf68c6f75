"""KV cache events beside vLLM's own; the random sessions of `test_vllm_fuzz` compare them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from tests.vllm.core import Core, RequestScript, make_scheduler, vllm_config
from vajra_py.errors import ConfigError
from vajra_py.vllm import Scheduler

SCRIPTS = [
    RequestScript("r-0", tuple(range(20, 60)), 20, 0),
    RequestScript("r-1", tuple(range(20, 60)), 3, 1, salt="of-one-tenant"),
    RequestScript("r-2", tuple(range(20, 60)), 3, 2),
    RequestScript("r-3", tuple(range(200, 290)), 30, 4),
]


class Kept(EventPublisher):  # type: ignore[misc]  # vLLM is there at run time alone
    """A publisher of `--kv-events-config`, as anybody can register one."""

    def __init__(self, data_parallel_rank: int = 0, **config: Any) -> None:
        self.events: list[Any] = []
        self.is_open = True

    def publish(self, events: Any) -> None:
        self.events += events.events

    def shutdown(self) -> None:
        self.is_open = False


@pytest.fixture
def config(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vLLM's configuration in which events go to a `Kept`."""
    monkeypatch.setitem(EventPublisherFactory._registry, "kept", Kept)
    config = vllm_config(tiny_model, max_model_len=256)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq")
    config.kv_events_config.publisher = "kept"
    return config


def published(cls: type[Any], config: Any, made: list[Any]) -> list[Any]:
    scheduler = make_scheduler(cls, config, 17, 8)
    core = Core(scheduler)
    core.run(SCRIPTS, 8, caches=True)
    assert scheduler.reset_prefix_cache()
    core.run([RequestScript("last-0", (5,) * 8, 1, 0)], 8, caches=True)
    scheduler.shutdown()
    (publisher,) = made
    made.clear()
    assert not publisher.is_open
    return list(publisher.events)


def test_a_router_is_told_what_vllms_own_scheduler_tells(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    begin = Kept.__init__

    def noted(self: Kept, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        made.append(self)

    monkeypatch.setattr(Kept, "__init__", noted)
    own, ours = (published(cls, config, made) for cls in (VllmScheduler, Scheduler))
    assert sorted(map(repr, ours)) == sorted(map(repr, own))
    assert {type(one).__name__ for one in ours} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert any("of-one-tenant" in repr(one.extra_keys) for one in ours if hasattr(one, "extra_keys"))


def test_events_are_refused_beside_a_policy_that_takes_them(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("version: 1\npreset: vllm-v1\nscheduling: {retention: slru}\n")
    monkeypatch.setenv("VAJRA_VLLM_EXPERIMENT", str(file))
    with pytest.raises(ConfigError, match="--kv-events-config: KV events are not published"):
        make_scheduler(Scheduler, config, 17, 8)
