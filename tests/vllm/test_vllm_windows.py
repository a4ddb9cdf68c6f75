"""Models with sliding windows and several groups of KV blocks, scheduled with vLLM's KV manager as the memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config.kv_events import KVEventsConfig
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.sched.scheduler import Scheduler as VllmsOwn

from tests.vllm.core import Core, RequestScript, calls_of, kv_cache, make_scheduler, vllm_config
from tests.vllm.fuzz import compare
from tests.vllm.plugins import built_in
from tests.vllm.worker_model import ExpectedTokens, KvSlots, WorkerFault
from vajra_py.contract import Layer
from vajra_py.errors import ConfigError
from vajra_py.vllm import Scheduler
from vajra_py.vllm.managed_kv import ManagedKv
from vajra_py.vllm.support import needs_manager

BACKEND = """
backend:
  vllm:
    latency: {type: roofline, model: llama-3.1-8b, device: a100-80gb-sxm}
    output_length: {type: constant, mean_tokens: 20, p50_tokens: 20, p90_tokens: 30}
"""
PARAMS = {"dynamic_chunk": "{target_batch_time_s: 0.05}", "scorpio": "{rejects: false}"}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(2_000_000, 2_000_006))
def test_a_session_is_vllms_and_its_messages_are_carried_out(tiny_model: str, seed: int, is_async: bool) -> None:
    found, _ = compare(tiny_model, seed, is_async=is_async, kind="windows")
    assert found is None


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(2_000_000, 2_000_006))
def test_a_session_with_drafts_is_vllms(tiny_model: str, seed: int, is_async: bool) -> None:
    found, counts = compare(tiny_model, seed, is_async=is_async, kind="windows-drafts")
    assert found is None
    assert counts["drafted"] > counts["accepted"] > 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_sessions_of_this_run_alone(tiny_model: str, is_async: bool) -> None:
    """Other seeds each time; a failure names its own."""
    first = random.SystemRandom().randrange(10**9)
    for seed in range(first, first + 2):
        found, _ = compare(tiny_model, seed, is_async=is_async, kind="windows")
        assert found is None, f"make vllm-fuzz SEED={seed} COUNT=1 KINDS=windows: {found}"


def core_of(
    cls: type[Any],
    model: str,
    windows: tuple[int | None, ...],
    num_blocks: int,
    file: Path | None = None,
    tokens: int = 48,
) -> Core:
    config = vllm_config(
        model, max_model_len=256, max_num_seqs=6, max_num_batched_tokens=tokens, enable_prefix_caching=True
    )
    config.additional_config = {} if file is None else {"vajra": {"experiment": str(file)}}
    return Core(make_scheduler(cls, config, num_blocks + 1, 8, cache=kv_cache(num_blocks + 1, 8, windows)))


def scripts_of(seed: int) -> list[RequestScript]:
    rng = random.Random(seed)
    common = [rng.randrange(8, 400) for _ in range(60)]
    prompts = [
        common[: rng.choice((0, 24, 60))] + [rng.randrange(8, 400) for _ in range(rng.randint(1, 60))]
        for _ in range(12)
    ]
    return [
        RequestScript(f"r-{index}", tuple(prompt), rng.randint(1, 60), index // 3)
        for index, prompt in enumerate(prompts)
    ]


def experiment(folder: Path, scheduling: str, more: str = "replica: {memory: {reservation: incremental}}") -> Path:
    file = folder / "experiment.yaml"
    file.write_text(f"version: 1\n{scheduling}\n{more}\n{BACKEND}")
    return file


@pytest.mark.parametrize("batcher", built_in(Layer.REPLICA_SCHEDULER))
def test_a_policy_does_not_notice(tiny_model: str, tmp_path: Path, batcher: str) -> None:
    """Every request gets its tokens, and no worker reads what a window has left."""
    params = f", params: {PARAMS[batcher]}" if batcher in PARAMS else ""
    scheduling = "request_prioritizer: lrs, replicaset_scheduler: pull, replica_scheduler: "
    file = experiment(tmp_path, f"scheduling: {{{scheduling}{{policy: {batcher}{params}}}}}")
    core = core_of(Scheduler, tiny_model, (None, 20), 60, file, tokens=256)
    scripts = scripts_of(1)
    core.run(scripts, 8, True)
    assert {name: len(tokens) for name, tokens in core.tokens.items()} == {one.name: one.max_tokens for one in scripts}
    memory = core.scheduler.mechanism.replica.memory
    assert isinstance(memory, ManagedKv)
    assert memory.free_blocks == memory.num_blocks == 60
    memory.check()
    assert core.scheduler.mechanism.fault is None
    core.scheduler.shutdown()


def test_a_request_longer_than_all_memory_runs_within_its_window(tiny_model: str) -> None:
    core = core_of(Scheduler, tiny_model, (9,), 10)
    core.run([RequestScript("r-0", tuple(range(100, 220)), 100, 0)], 8, True)
    assert len(core.tokens["r-0"]) == 100
    assert max(10 - step.free for step in core.steps) <= 8


def test_a_steady_step_makes_at_most_a_fifth_of_vllms_calls(tiny_model: str) -> None:
    """What an evidence page says of 256 requests, on 48; calls of functions do not depend on the machine."""

    def num_calls(cls: type[Any]) -> int:
        config = vllm_config(tiny_model, max_model_len=512, max_num_seqs=48, max_num_batched_tokens=4096)
        blocks = 48 * 2 * 20 + 1
        core = Core(make_scheduler(cls, config, blocks, 16, cache=kv_cache(blocks, 16, (None, 64))))
        for index in range(48):
            core.add(RequestScript(f"r-{index}", tuple(range(10, 20 + index)), 100, 0), 16, True)
        while len(core.tokens) < 48:
            core.step()
        counted = sum(calls_of(core) for _ in range(16))
        core.scheduler.shutdown()
        return counted

    assert num_calls(Scheduler) * 5 < num_calls(VllmsOwn)


# Log messages, and refused settings


def test_the_memory_is_named_at_the_start(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Log:
        def info(self, line: str) -> None:
            said.append(line)

    monkeypatch.setattr("vajra_py.vllm.scheduler.init_logger", lambda name: Log())
    for windows in ((None,), (16,), (None, 16)):
        core_of(Scheduler, tiny_model, windows, 60).scheduler.shutdown()
    assert ["vLLM's own manager" in line for line in said] == [False, True, True]


WITHOUT = "scheduling: {replica_scheduler: vllm_v1, request_prioritizer: fcfs}"
INCREMENTAL = "replica: {memory: {reservation: incremental%s}}"


@pytest.mark.parametrize(
    ("scheduling", "more", "where"),
    [
        (WITHOUT, "", "replica.memory.reservation"),
        (WITHOUT, INCREMENTAL % ", prefix_cache: {reuse_order: fifo}", "replica.memory.prefix_cache.reuse_order"),
        (WITHOUT, INCREMENTAL % ", prefix_cache: {retain_freed: false}", "replica.memory.prefix_cache.retain_freed"),
    ],
)
def test_settings_that_vllms_manager_does_not_follow_are_refused(
    tiny_model: str, tmp_path: Path, scheduling: str, more: str, where: str
) -> None:
    with pytest.raises(ConfigError, match=where):
        core_of(Scheduler, tiny_model, (None, 16), 60, experiment(tmp_path, scheduling, more))


def test_a_recording_and_kv_events_are_refused(tiny_model: str, tmp_path: Path) -> None:
    config = vllm_config(tiny_model, max_model_len=256)
    config.additional_config = {"vajra": {"save_run": str(tmp_path / "run")}}
    with pytest.raises(ConfigError, match="save_run"):
        make_scheduler(Scheduler, config, 61, 8, cache=kv_cache(61, 8, (16,)))
    config.additional_config = {}
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with pytest.raises(ConfigError, match="--kv-events-config"):
        make_scheduler(Scheduler, config, 61, 8, cache=kv_cache(61, 8, (16,)))


SIZES: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = kv.FullAttentionSpec(block_size=16, **SIZES)
WINDOW = kv.SlidingWindowSpec(block_size=16, **SIZES, sliding_window=64)
LARGE = kv.SlidingWindowSpec(block_size=32, **SIZES, sliding_window=64)
CHUNKED = kv.ChunkedLocalAttentionSpec(block_size=16, **SIZES, attention_chunk_size=64)
WITH_WINDOW = kv.FullAttentionSpec(block_size=16, **SIZES, sliding_window=64)


def cache_of(*specs: Any) -> kv.KVCacheConfig:
    groups = [kv.KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return kv.KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("specs", "is_managed"),
    [((FULL,), False), ((WITH_WINDOW,), False), ((WINDOW,), True), ((FULL, WINDOW), True), ((FULL, FULL), True)],
)
def test_vllms_manager_serves_where_this_projects_memory_cannot(specs: tuple[Any, ...], is_managed: bool) -> None:
    assert needs_manager(cache_of(*specs), 16, 16) is is_managed


@pytest.mark.parametrize(
    ("specs", "word"), [((FULL, CHUNKED), "a kind that is not known"), ((FULL, LARGE), "differ in size"), ((), "none")]
)
def test_other_kinds_of_blocks_are_refused(specs: tuple[Any, ...], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        needs_manager(cache_of(*specs), 16, 16)


# The workers' model detects the errors that it is meant to detect


def expected() -> ExpectedTokens:
    return ExpectedTokens(tuple(range(20)), "", lambda position: position)


def test_a_table_may_lack_what_its_window_has_left_and_nothing_else() -> None:
    slots = KvSlots(4, (None, 5))
    slots.check_tables("a", [[1, 2, 3], [0, 4, 5]], 8, 9)
    for tables in ([[1, 2, 3], [0, 0, 5]], [[0, 2, 3], [0, 4, 5]], [[1, 2, 3], [0, 3, 5]], [[1, 2, 3]]):
        with pytest.raises(WorkerFault, match="block tables"):
            slots.check_tables("a", tables, 8, 9)


def test_kv_of_another_group_is_noticed() -> None:
    slots = KvSlots(4, (None, 5))
    slots.write("a", expected(), [[1, 2], [3, 4]], 0, 6)
    slots.write("a", expected(), [[1, 2, 5], [0, 4, 6]], 6, 9)
    slots.read("a", expected(), [[1, 2, 5], [0, 4, 6]], 8, 9)
    with pytest.raises(WorkerFault, match="another content"):
        slots.read("a", expected(), [[3, 4], [1, 2]], 0, 6)
