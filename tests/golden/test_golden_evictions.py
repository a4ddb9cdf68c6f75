"""Do retention policies give up what SGLang's radix cache and vLLM's offloading manager did, and is a difference noticed?"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.readers import compare_folder

RECORDED = {"evict_sglang": (56, 6909), "evict_vllm_offload": (50, 11092)}


def folder_of(shared_dir: Path, system: str) -> Path:
    folder = shared_dir / "recorded" / system
    if not folder.is_dir():
        pytest.skip(f"recorded evictions absent: no folder {folder}")
    return folder


@pytest.mark.parametrize("system", RECORDED)
def test_every_recorded_eviction_is_reproduced(shared_dir: Path, system: str) -> None:
    results = list(compare_folder(folder_of(shared_dir, system)))
    for result in results:
        told = result.difference.lines() if result.difference else []
        assert result.matches, "\n".join([f"{result.system}/{result.name}", *told])
    assert (len(results), sum(result.num_compared for result in results)) == RECORDED[system]


@pytest.mark.parametrize(
    ("system", "recorded", "other"),
    [
        ("evict_sglang", "lru", "fifo"),
        ("evict_sglang", "lfu", "lru"),
        ("evict_sglang", "priority", "lru"),
        ("evict_sglang", "mru", "filo"),
        ("evict_vllm_offload", "arc", "lru"),
        ("evict_vllm_offload", "lru", "mru"),
    ],
)
def test_another_policy_is_noticed(shared_dir: Path, tmp_path: Path, system: str, recorded: str, other: str) -> None:
    with gzip.open(folder_of(shared_dir, system) / "runs.jsonl.gz", "rt") as stream:
        runs: list[dict[str, Any]] = [run for run in map(json.loads, stream) if run["policy"] == recorded]
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
