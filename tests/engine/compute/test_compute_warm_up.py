"""What is compiled before the first request is all that a run's steps need: counted with stand-ins, nothing is launched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

from vajra_kernels import attention, ops  # noqa: E402
from vajra_kernels.aot import specialization  # noqa: E402
from vajra_kernels.launch import Launch  # noqa: E402
from vajra_py.engine.compute import RunnerOptions, SamplingParams, batch, fused, fused_parts, sampler  # noqa: E402
from vajra_py.engine.compute.runner import TorchRunner  # noqa: E402
from vajra_py.engine.compute.warm_up import warm_up  # noqa: E402

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
    for module in (fused, fused_parts, attention, ops, sampler):
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
        warm_up(runner._model, runner._memory, options)
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
