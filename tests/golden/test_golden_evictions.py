"""Evictions of SGLang's radix cache and vLLM's offloading manager: another retention policy than the recorded one is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.readers import compare_folder


@pytest.mark.parametrize(
    ("system", "policy", "other"),
    [
        ("evict_sglang", "lru", "fifo"),
        ("evict_sglang", "lfu", "lru"),
        ("evict_sglang", "priority", "lru"),
        ("evict_sglang", "mru", "filo"),
        ("evict_vllm_offload", "arc", "lru"),
        ("evict_vllm_offload", "lru", "mru"),
    ],
)
def test_another_policy_is_noticed(
    recorded_cases: Callable[[str], list[dict[str, Any]]], tmp_path: Path, system: str, policy: str, other: str
) -> None:
    runs = [run for run in recorded_cases(f"{system}/runs.jsonl.gz") if run["policy"] == policy]
    changed = [json.dumps({**run, "policy": other}) for run in runs]
    (tmp_path / "changed.jsonl").write_text("\n".join(changed))
    differing = [result for result in compare_folder(tmp_path) if result.difference is not None]
    assert {result.difference.field for result in differing if result.difference} <= {
        "victims",
        "freed",
        "evicted",
        "stored",
    }
    assert len(differing) > len(runs) / 2
