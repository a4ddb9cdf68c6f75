"""A real vLLM that looks its drafts up, under this project's scheduler and under vLLM's own, on a tiny model."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.vllm.test_vllm_real import OPTIONS, greedy, prompts, scheduler_of
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.vllm import Scheduler

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def wanted_of(number: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    rng = random.Random(7)
    return prompts(number, 5), [greedy(rng, ignore_eos=rng.random() < 0.5) for _ in range(number)]


def generated(llm: LLM, number: int = 40) -> list[tuple[list[int], Any, Any, int | None]]:
    outputs = llm.generate(*wanted_of(number), use_tqdm=False)
    return [
        (list(each.token_ids), each.finish_reason, each.stop_reason, one.num_cached_tokens)
        for one in outputs
        for each in one.outputs
    ]


@pytest.fixture
def scans_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's build for CPUs start with n-grams: it takes the attributes of a wrapper in llvmlite for a mapping, and fails."""
    ffi = pytest.importorskip("llvmlite.binding.ffi")
    monkeypatch.setattr(ffi._lib_fn_wrapper, "get", lambda self, name: None, raising=False)


@pytest.mark.long
@pytest.mark.usefixtures("scans_modules")
def test_greedy_tokens_and_counts_are_vllms_and_the_session_is_replayed(tiny_model: str, tmp_path: Path) -> None:
    found, drafts = [], []
    given: list[dict[str, Any]] = [
        {"async_scheduling": False},
        {"async_scheduling": False, "speculative_config": DRAFTS},
        {
            "scheduler_cls": Scheduler,
            "speculative_config": DRAFTS,
            "additional_config": {"vajra": {"save_run": str(tmp_path / "run")}},
        },
    ]
    for options in given:
        llm = LLM(tiny_model, **(OPTIONS | options))
        found.append(generated(llm))
        counts = [one for one in llm.get_metrics() if "spec_decode" in one.name]
        drafts.append({one.name: getattr(one, "value", getattr(one, "values", None)) for one in counts})
        scheduler_of(llm).shutdown()
        del llm
        gc.collect()
    assert [one[0] for one in found[2]] == [one[0] for one in found[0]]
    assert found[2] == found[1]
    assert drafts[2] == drafts[1]
    assert drafts[2]["vllm:spec_decode_num_accepted_tokens"] > 20
    report = replay(tmp_path / "run")
    assert report.difference is None
    accepted = RunData.load(tmp_path / "run").requests()["num_accepted_tokens"].to_pylist()
    assert sum(accepted) > 20
