"""What is compiled before the first request is all that a run's steps need: counted with stand-ins, nothing is launched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

from vajra_kernels import attention, backend, ops  # noqa: E402
from vajra_kernels.aot import specialization  # noqa: E402
from vajra_kernels.launch import Launch  # noqa: E402
from vajra_py.engine.compute import Chunk, NewRow, RunnerOptions, SamplingParams, StepInput, TableUpdate, batch  # noqa: E402
from vajra_py.engine.compute.model import fused  # noqa: E402
from vajra_py.engine.compute.model.kv_groups import GroupLinks  # noqa: E402
from vajra_py.engine.compute.model.ranks import Ranks  # noqa: E402
from vajra_py.engine.compute.model.shard import Shard  # noqa: E402
from vajra_py.engine.compute.model.stage import Stage  # noqa: E402
from vajra_py.engine.compute.sampling import sampler  # noqa: E402
from vajra_py.engine.compute.step import runner as runner_module  # noqa: E402
from vajra_py.engine.compute.step.runner import TorchRunner  # noqa: E402
from vajra_py.engine.compute.step.warm_up import warm_up  # noqa: E402

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.8, logprobs=2),
    SamplingParams(top_k=5, frequency_penalty=0.3, min_tokens=3),
]
FAMILIES = ["llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt_oss"]


def joined(arrays: Sequence[Any], device: Any) -> list[Any]:
    """As on a GPU: parts of one tensor, most of them at addresses that are no multiple of 16."""
    return list(torch.split(torch.from_numpy(np.concatenate(arrays)), [array.size for array in arrays]))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Specialisations of the launches so far; tensors of the CPU count as a GPU's, and results are zeros."""
    found: set[str] = set()

    def recorded(launch: Launch) -> None:
        found.add(specialization(launch))
        for name in ("out_ptr", "query_ptr", "tokens_ptr", "lse_ptr"):
            if name in launch.arguments:
                launch.arguments[name].zero_()

    monkeypatch.setattr(Launch, "run", recorded)
    monkeypatch.setattr(batch, "all_to_device", joined)
    for module in (backend, fused, attention, ops, sampler):
        monkeypatch.setattr(module, "uses_triton", lambda device: True)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_need_no_other_kernels(
    family: str,
    compute_kit: Any,
    small_models: Callable[[str], str],
    seen: set[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = RunnerOptions(small_models(family), block_size=4, max_requests=40, spare_blocks=2, self_check=False)
    runner = TorchRunner.load(options)
    runner.allocate(14, 20)
    assert runner._memory is not None
    with caplog.at_level(logging.INFO):
        warm_up(runner._model, runner._memory, options, runner._ranks)
    assert "kernels ready after" in caplog.text
    ready = set(seen)
    names = {one.split()[0] for one in ready}
    assert {"sample_kernel", "copy_blocks_kernel", "decode_kernel", "ragged_kernel"} <= names
    rng = np.random.default_rng(1)
    driver = compute_kit.driver(runner, 14, 3)
    jobs = [
        compute_kit.job(rng.integers(3, 90, int(size)).tolist(), 8, PARAMS[index % 3], seed=index)
        for index, size in enumerate(rng.integers(2, 24, 9))
    ]
    driver.run(jobs, together=5)
    assert driver.counts["swap"] + driver.counts["recompute"] > 0
    assert sorted(seen - ready) == []


GROUP_TOKENS = 24
PLACES = {
    "one of two tensor-parallel ranks": (Ranks(Shard(1, 2)), {"tensor_parallel_size": 2}),
    "first of two stages": (Ranks(stage=Stage(0, 2, None, 1)), {"pipeline_stages": 2}),
    "last of two stages": (Ranks(stage=Stage(1, 2, 0)), {"pipeline_stages": 2}),
    "first of three groups": (Ranks(groups=GroupLinks(0, GROUP_TOKENS, [0, 1, 2])), {"kv_groups": 3}),
    "last of three groups": (Ranks(groups=GroupLinks(2, GROUP_TOKENS, [0, 1, 2])), {"kv_groups": 3}),
}


def step_of_ranks(rng: np.random.Generator, ranks: Ranks, max_model_len: int) -> StepInput:
    """Chunks of a few requests anywhere in their sequences, those of KV-parallel groups in this one and others."""
    chunks, tables, new = [], [], []
    for slot in range(int(rng.integers(1, 6))):
        size, own = (max_model_len, 0) if ranks.groups is None else (GROUP_TOKENS, ranks.groups.own)
        newest = own if ranks.groups is None else int(rng.integers(own, 3))
        begin, end = newest * size, min((newest + 1) * size, max_model_len)
        start = int(rng.integers(begin, end))
        length = int(rng.integers(1, min(9, end - start) + 1))
        first = int(rng.integers(0, own + 1))
        groups = () if ranks.groups is None else tuple(range(newest + 1))
        if newest == own and first == own and ranks.groups is not None:  # all in this group
            groups, start = (own,), start - begin
        chunks.append(Chunk(slot, rng.integers(3, 90, length).tolist(), start, True, groups=groups))
        tables.append(TableUpdate(slot, 0, rng.integers(0, 14, -(-size // 4)).tolist(), own))
        new.append(NewRow(slot, PARAMS[slot % 3], slot))
    return StepInput(chunks, new=new, tables=tables)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_of_several_needs_no_other_kernels(
    place: str, family: str, small_models: Callable[[str], str], seen: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, split = PLACES[place]
    for name in ("all_reduce", "all_gather", "recv", "isend"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "P2POp", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", lambda _: [])
    monkeypatch.setattr(runner_module, "join_ranks", lambda options: ranks)
    options = RunnerOptions(
        small_models(family), block_size=4, max_requests=40, self_check=False, kv_group_tokens=GROUP_TOKENS,
        max_model_len=3 * GROUP_TOKENS, **split,
    )  # fmt: skip
    runner = TorchRunner.load(options)
    runner.allocate(14)
    assert runner._memory is not None
    warm_up(runner._model, runner._memory, options, ranks)
    ready, rng = set(seen), np.random.default_rng(0)
    freed: list[int] = []
    num_spread = 0
    for _ in range(40):
        step = step_of_ranks(rng, ranks, 3 * GROUP_TOKENS)
        runner.run(replace(step, freed=freed))
        freed = [row.slot for row in step.new]
        num_spread += any(len(one.groups) > 1 for one in step.chunks)
    assert not runner._faults
    assert num_spread > 10 or ranks.groups is None
    assert sorted(seen - ready) == []
