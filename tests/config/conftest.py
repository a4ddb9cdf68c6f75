"""A registry and a workload type that do not depend on installed packages."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, cast

import pytest
from pydantic import BaseModel, ConfigDict, Field

from vajra_py.config import choices, editor_schema
from vajra_py.contract import Layer, PolicyConfig, PolicySpec, hookimpl
from vajra_py.contract.hookspecs import ObserverSpec, Preset
from vajra_py.contract.observer import Observer
from vajra_py.plugins import Registry, build_registry


class NoParams(PolicyConfig):
    pass


class SlackParams(PolicyConfig):
    deadline_multiplier: float = Field(1.5, gt=0)
    order: Literal["fast", "slow"] = "fast"


class ChunkParams(PolicyConfig):
    target_batch_time_s: float = Field(0.05, gt=0)
    sizes: tuple[int, ...] = ()


class RequiredParams(PolicyConfig):
    chunk_tokens: int = Field(gt=0)


class CrashingParams(PolicyConfig):
    at: int = 0

    def model_post_init(self, context: Any) -> None:
        _ = 1 / self.at


class WatchParams(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    every_s: float = Field(1.0, gt=0)


def policy(name: str, layer: Layer, config: type[PolicyConfig], *aliases: str) -> PolicySpec:
    return PolicySpec(name, layer, config, lambda c, x: cast(Any, None), f"About {name}.", "", aliases)


@hookimpl
def vajra_policies() -> list[PolicySpec]:
    prioritizer, router, scheduler = Layer
    return [
        policy("fcfs", prioritizer, NoParams),
        policy("lrs", prioritizer, SlackParams, "lars"),
        policy("crashing", prioritizer, CrashingParams),
        policy("pull", router, NoParams),
        policy("round_robin", router, NoParams),
        policy("dynamic_chunk", scheduler, ChunkParams),
        policy("fixed_chunk", scheduler, RequiredParams),
        policy("vllm", scheduler, NoParams),
    ]


@hookimpl
def vajra_presets() -> list[Preset]:
    scheduling = {
        "request_prioritizer": {"policy": "lrs", "params": {"deadline_multiplier": 4.0}},
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": "vllm",
    }
    replica = {"max_batch_size": 256, "memory": {"watermark_fraction": 0.0, "prefix_cache": {"reuse_order": "fifo"}}}
    broken = {**scheduling, "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_tokens": -1}}}
    return [
        Preset("vllm-v1", "As vLLM does.", "vLLM", scheduling, replica),
        Preset("broken", "Wrong.", "", broken, {"max_batch_sise": 1}),
    ]


@hookimpl
def vajra_observers() -> list[ObserverSpec]:
    return [ObserverSpec("watch", WatchParams, lambda c: Observer(), "Watches.")]


class AzureWorkload(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["azure"]
    path: str
    time_scale: float = Field(1.0, gt=0)


class SyntheticWorkload(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["synthetic"]
    rate: float = Field(gt=0)
    lengths: list[int] = Field(default_factory=list)


@pytest.fixture(scope="session")
def registry() -> Registry:
    module = SimpleNamespace(
        vajra_policies=vajra_policies, vajra_presets=vajra_presets, vajra_observers=vajra_observers
    )
    distribution = SimpleNamespace(name="test-lab", version="1.2")
    entry = SimpleNamespace(name="lab", value="lab", dist=distribution, load=lambda: module)
    return build_registry([cast(metadata.EntryPoint, entry)])


@pytest.fixture(autouse=True)
def _workload(monkeypatch: pytest.MonkeyPatch) -> None:
    annotation = Annotated[AzureWorkload | SyntheticWorkload, Field(discriminator="type")]
    monkeypatch.setattr(choices, "workload_annotation", lambda: annotation)
    monkeypatch.setattr(editor_schema, "workload_annotation", lambda: annotation)


GOOD = """\
version: 1
seed: 42
scheduling:
  request_prioritizer: {policy: lars, params: {deadline_multiplier: 2}}
  replicaset_scheduler: pull
  replica_scheduler:
    policy: dynamic_chunk
    params:
      sizes: [1, 2]
workload: {type: synthetic, rate: 4.0}
backend: {simulator: {latency: {type: constant, step_time_s: 0.5}}}
"""


@pytest.fixture
def good() -> str:
    return GOOD


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write `exp.yaml` into the current folder and return its name."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "exp.yaml") -> str:
        Path(name).write_text(text)
        return name

    return _write
