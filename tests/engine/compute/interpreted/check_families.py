"""The fused forward pass as a GPU runs it, kernels interpreted, against transformers' own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vajra_kernels.launch import Launch
from vajra_py.engine.compute import RunnerOptions
from vajra_py.engine.compute.step.runner import TorchRunner

FAMILIES = ("llama", "phi3", "gemma3_text", "qwen3_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_families_pass_the_self_check(
    family: str, small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: set[str] = set()
    plain = Launch.run

    def run(launch: Launch) -> None:
        launched.add(launch.kernel.__name__)
        plain(launch)

    monkeypatch.setattr(Launch, "run", run)
    runner = TorchRunner.load(RunnerOptions(small_models(family), block_size=4, max_requests=4))
    assert runner.facts.forward == "fused"
    assert {"norm_kernel", "rotate_kernel"} <= launched
    assert ("gated_kernel" in launched) == (family != "qwen3_moe")
