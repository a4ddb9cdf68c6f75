"""Every policy of an experiment file schedules one real vLLM: no request is lost, tokens are the same, blocks are all free."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.plugins import ROOT, built_in, install
from vajra_py.contract import Layer
from vajra_py.plugins import Registry, build_registry
from vajra_py.vllm import Scheduler

TEMPLATE = "[vajra]\nvajra_example_policies = vajra_example_policies\n"
BACKEND = {
    "latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"},
    "output_length": {"type": "constant", "mean_tokens": 40, "p50_tokens": 40, "p90_tokens": 60},
}
PRIORITIZERS = [*built_in(Layer.REQUEST_PRIORITIZER), "example_aging_shortest"]
CHOOSERS = [*built_in(Layer.REPLICASET_SCHEDULER), "example_prefix_affinity"]
BATCHERS = [*built_in(Layer.REPLICA_SCHEDULER), "example_capped_chunk"]
PARAMS = {
    "dynamic_chunk": "{target_batch_time_s: 0.05}",
    "scorpio": "{rejects: false}",
    "example_capped_chunk": "{chunk_tokens: 256, capped_chunk_tokens: 48}",
}
NUM_BLOCKS = 15


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("site")
    install(folder, "vajra-example-policies", TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "plugin_template" / "src"))
        patch.syspath_prepend(str(folder))
        found = build_registry(metadata.entry_points(group="vajra"))
        patch.setattr("vajra_py.vllm.scheduler.load_registry", lambda: found)
        yield found


@dataclass
class Vllm:
    """A vLLM whose scheduler can be replaced, and what its own scheduler gave."""

    llm: LLM
    num_blocks: int
    asked: list[tuple[list[int], SamplingParams]]
    expected: list[list[int]]
    num_served: int = 0

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def schedule_by(self, file: Path) -> Any:
        """Another experiment file decides from now on."""
        before, config = self.core.scheduler, self.core.vllm_config
        before.schedule()
        before.shutdown()
        config.additional_config = {"vajra": {"experiment": str(file)}}
        self.core.scheduler = Scheduler(
            config, before.kv_cache_config, StructuredOutputManager(config), config.cache_config.block_size
        )
        return self.core.scheduler

    def serve(self) -> list[list[int]]:
        """The requests come in a few at a time."""
        engine, found, left = self.llm.llm_engine, {}, list(enumerate(self.asked))
        first = self.num_served
        self.num_served += len(left)
        while left or engine.has_unfinished_requests():
            for index, (tokens, params) in left[:3]:
                engine.add_request(f"{first + index}", {"prompt_token_ids": tokens}, params, priority=index % 3)
            left = left[3:]
            for one in engine.step():
                if one.finished:
                    assert one.outputs[0].finish_reason == "length"
                    found[int(one.request_id) - first] = list(one.outputs[0].token_ids)
        return [found[index] for index in range(len(self.asked))]


def asked(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    common = [rng.randrange(3, 1000) for _ in range(70)]
    found = []
    for index in range(16):
        tokens = common[: rng.choice((0, 33, 66))] + [rng.randrange(3, 1000) for _ in range(rng.randint(1, 90))]
        extra = {"vajra_ttft_slo_s": 0.1 * (1 + index % 4), "vajra_tbt_slo_s": 0.05, "vajra_tenant": f"t{index % 3}"}
        number = rng.randint(1, 60)
        found.append((tokens, SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True, extra_args=extra)))
    return found


@pytest.fixture(scope="module")
def vllm(tiny_model: str, registry: Registry) -> Iterator[Vllm]:
    llm = LLM(
        tiny_model,
        dtype="float32",
        block_size=32,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enforce_eager=True,
        async_scheduling=False,
        num_gpu_blocks_override=NUM_BLOCKS + 1,
    )
    found = Vllm(llm, NUM_BLOCKS, asked(random.Random(5)), [])
    found.expected = found.serve()
    yield found
    found.core.scheduler.shutdown()
    del found, llm
    gc.collect()


def experiment(file: Path, prioritizer: str, chooser: str, batcher: str) -> Path:
    params = f", params: {PARAMS[batcher]}" if batcher in PARAMS else ""
    lines = [
        "version: 1",
        "scheduling:",
        f"  request_prioritizer: {prioritizer}",
        f"  replicaset_scheduler: {chooser}",
        f"  replica_scheduler: {{policy: {batcher}{params}}}",
        "backend:",
        "  vllm:",
        *(f"    {name}: {value}".replace("'", "") for name, value in BACKEND.items()),
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def check(vllm: Vllm, file: Path) -> None:
    scheduler = vllm.schedule_by(file)
    assert vllm.serve() == vllm.expected
    scheduler.schedule()
    memory = scheduler.mechanism.replica.memory
    assert memory.num_blocks == memory.free_blocks == vllm.num_blocks
    memory.check()
    scheduler.mechanism.controller.check_conservation()
    assert scheduler.mechanism.fault is None
    assert not scheduler.requests


@pytest.mark.parametrize(("batcher", "prioritizer"), list(zip(BATCHERS, cycle(("lrs", "example_aging_shortest")))))
def test_replica_schedulers(vllm: Vllm, tmp_path: Path, batcher: str, prioritizer: str) -> None:
    prioritizer = "lrs" if batcher == "space_sharing" else prioritizer  # it needs slack
    check(vllm, experiment(tmp_path / "experiment.yaml", prioritizer, "pull", batcher))


@pytest.mark.parametrize(("prioritizer", "batcher"), list(zip(PRIORITIZERS, cycle(("vllm_v1", "fixed_chunk")))))
def test_prioritizers(vllm: Vllm, tmp_path: Path, prioritizer: str, batcher: str) -> None:
    check(vllm, experiment(tmp_path / "experiment.yaml", prioritizer, "round_robin", batcher))


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_replicaset_schedulers(vllm: Vllm, tmp_path: Path, chooser: str) -> None:
    check(vllm, experiment(tmp_path / "experiment.yaml", "edf", chooser, "vllm_v1"))


@pytest.mark.parametrize(("prioritizer", "is_first"), [("priority", True), ("fcfs", False)])
def test_a_priority_of_vllms_reaches_the_policy(vllm: Vllm, tmp_path: Path, prioritizer: str, is_first: bool) -> None:
    vllm.schedule_by(experiment(tmp_path / "experiment.yaml", prioritizer, "round_robin", "vllm_v1"))
    engine, ended = vllm.llm.llm_engine, list[int]()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for index in range(12):  # four more than fit into a batch
        priority = -1 if index == 11 else 0
        engine.add_request(f"{prioritizer}-{index}", {"prompt_token_ids": [5, 6]}, params, priority=priority)
    while engine.has_unfinished_requests():
        ended += [int(one.request_id.rpartition("-")[2]) for one in engine.step() if one.finished]
    assert sorted(ended) == list(range(12))
    assert (ended.index(11) < 8) is is_first


@pytest.mark.parametrize("preset", ["sarathi", "vajra", "nano-vllm", "minivllm", "orca", "vllm-v1-priority"])
def test_presets(vllm: Vllm, tmp_path: Path, preset: str) -> None:
    file = tmp_path / "experiment.yaml"
    lines = "".join(f"    {name}: {value}\n".replace("'", "") for name, value in BACKEND.items())
    file.write_text(f"version: 1\npreset: {preset}\nbackend:\n  vllm:\n{lines}")
    check(vllm, file)
