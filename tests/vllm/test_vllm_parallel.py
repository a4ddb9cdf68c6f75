"""Tensor parallelism: two processes of vLLM's share every layer, and one scheduler tells both what runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.test_vllm_serve import environment, offline


@pytest.mark.long
def test_two_ranks_give_the_tokens_of_one(tiny_model: str, tmp_path: Path) -> None:
    known = environment(tmp_path, VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    runs = []
    for size in (2, 1):
        options = {"scheduler_cls": "vajra_py.vllm.Scheduler", "tensor_parallel_size": size}
        runs.append(offline(tiny_model, options, tmp_path, known)[0])
    assert runs[0] == runs[1]
    assert [reason for reason, _ in runs[0]] == ["length"] * 12
