"""Presets of Vajra and other systems: named settings of the three scheduling layers, replica options and pools.

If a system has no router (an engine is one replica), its preset routes round robin. Sizes that depend on the device (KV
blocks) are left open. Prefix-cache options, and the moment at which blocks become visible, are part of a system: they
determine cache hits, and thereby token counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vajra_py.contract.hookspecs import Preset

NO_PREFIX_CACHE: Mapping[str, Any] = {"enabled": False}
VICTIMS_FIRST: Mapping[str, Any] = {"policy": "fcfs", "params": {"preempted": "first"}}


def _scheduling(prioritizer: Any, scheduler: Any, router: Any = "round_robin") -> dict[str, Any]:
    return {"request_prioritizer": prioritizer, "replicaset_scheduler": router, "replica_scheduler": scheduler}


def _replica(
    max_batch_size: int, max_batch_tokens: int | None, memory: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    return {"max_batch_size": max_batch_size, "max_batch_tokens": max_batch_tokens, **more, "memory": memory}


def _memory(
    block_size: int = 16, reservation: str = "prompt", watermark_fraction: float = 0.0, **more: Any
) -> dict[str, Any]:
    return {"block_size": block_size, "reservation": reservation, "watermark_fraction": watermark_fraction, **more}


def _prefix_cache(
    *, publish: str, reuse_order: str, duplicates: str, release_order: str = "tail_first", retain_freed: bool = True
) -> dict[str, Any]:
    return {
        "enabled": True,
        "publish": publish,
        "reuse_order": reuse_order,
        "release_order": release_order,
        "retain_freed": retain_freed,
        "duplicates": duplicates,
    }


def _vllm(prioritizer: Any, victim: str, router: str = "round_robin") -> dict[str, Any]:
    return _scheduling(prioritizer, {"policy": "vllm_v1", "params": {"victim": victim}}, router)


_VLLM_CACHE = _prefix_cache(publish="schedule", reuse_order="lru", duplicates="keep_first")
_VLLM_REPLICA: Mapping[str, Any] = {
    **_replica(256, 2048, _memory(reservation="incremental", prefix_cache=_VLLM_CACHE)),
    "draft": {"rejected_blocks": "keep", "past_max_tokens": True},
}

_LINKS: Mapping[str, Any] = {"bandwidth_gb_s": 50}
_SPLIT_POOLS: Mapping[str, Any] = {
    "pools": {"prefill": {"num_replicas": 1}, "decode": {"num_replicas": 1}},
    "hand_off": "distserve",
    "links": _LINKS,
}


def _nano_replica(publish: str) -> dict[str, Any]:
    cache = _prefix_cache(publish=publish, reuse_order="fifo", duplicates="keep_last")
    return _replica(512, None, _memory(block_size=256, prefix_cache=cache), max_model_len=4096)


def _nano_scheduler(prefill: str) -> dict[str, Any]:
    return {"policy": "nano_vllm", "params": {"prefill": prefill, "prefill_budget_tokens": 16384}}


PRESETS: list[Preset] = [
    Preset(
        name="vllm-v1",
        summary="vLLM V1, first come first served, with a server's defaults on devices below 70 GiB and the A100.",
        source="vLLM 0.33: SchedulerConfig, CacheConfig, EngineArgs (max_num_seqs 256, max_num_batched_tokens 2048)",
        scheduling=_vllm(VICTIMS_FIRST, "latest_admitted"),
        replica=_VLLM_REPLICA,
    ),
    Preset(
        name="vllm-v1-priority",
        summary="vLLM V1 with --scheduling-policy priority.",
        source="vLLM 0.33",
        scheduling=_vllm("priority", "lowest_priority"),
        replica=_VLLM_REPLICA,
    ),
    Preset(
        name="llumnix",
        summary="Llumnix over vLLM: dispatch to the freest replica, and live migration; `migration:` has its defaults.",
        source="Llumnix (OSDI'24); AlibabaPAI/llumnix, GlobalSchedulerConfig and MigrationConfig",
        scheduling=_vllm(VICTIMS_FIRST, "latest_admitted", "llumnix"),
        replica=_VLLM_REPLICA,
    ),
    Preset(
        name="distserve",
        summary=(
            "DistServe: separate replicas for prompts and decodes; each request to the least loaded one of either kind."
        ),
        source="DistServe (OSDI'24); hand-off as in its simulator, the ratio of pools and the links (50 GB/s) are ours",
        scheduling=_scheduling("fcfs", "fixed_chunk", "least_loaded"),
        replica={"memory": {"prefix_cache": NO_PREFIX_CACHE}},
        replicaset=_SPLIT_POOLS,
    ),
    Preset(
        name="splitwise",
        summary="Splitwise: pools for prompts and decodes, which lend each other replicas while one is full.",
        source="Splitwise (ISCA'24); splitwise-sim; the ratio of pools and the links (50 GB/s) are ours",
        scheduling=_scheduling("fcfs", "fixed_chunk", "splitwise_mixed_pool"),
        replica={"memory": {"prefix_cache": NO_PREFIX_CACHE}},
        replicaset={
            "pools": {
                "prompt": {"num_replicas": 1, "role": "mixed"},
                "token": {"num_replicas": 1, "role": "mixed"},
            },
            "hand_off": "splitwise",
            "links": _LINKS,
        },
    ),
    Preset(
        name="mooncake",
        summary=(
            "Mooncake: its conductor over split pools with prefix caches, and early rejection of requests that would "
            "be late."
        ),
        source="Mooncake (FAST'25), Algorithm 1; the ratio of pools and the links (50 GB/s) are ours",
        scheduling={**_scheduling("fcfs", "fixed_chunk", "mooncake_conductor"), "admission": "mooncake"},
        replicaset=_SPLIT_POOLS,
    ),
    Preset(
        name="dynaserve",
        summary="DynaServe: each request cut at one token into two parts, so that two replicas have the same work.",
        source="DynaServe (arXiv:2504.09285); the links (50 GB/s) are ours",
        scheduling=_scheduling("fcfs", "micro_requests", "dynaserve"),
        replicaset={"links": _LINKS},
    ),
    Preset(
        name="nano-vllm",
        summary="nano-vLLM of 2026: the first prompt of a step may be cut.",
        source="nano-vLLM bb823b3, Config",
        scheduling=_scheduling(VICTIMS_FIRST, _nano_scheduler("chunk_first")),
        replica=_nano_replica("step_end"),
    ),
    Preset(
        name="nano-vllm-old",
        summary="nano-vLLM of 2025: whole prompts.",
        source="nano-vLLM 2f21442, Config",
        scheduling=_scheduling(VICTIMS_FIRST, _nano_scheduler("whole")),
        replica=_nano_replica("schedule"),
    ),
    Preset(
        name="minivllm",
        summary="MinivLLM as documented; sizes of its example.",
        source="MinivLLM, documentation and main.py",
        scheduling=_scheduling(VICTIMS_FIRST, "minivllm"),
        replica=_replica(
            16,
            1024,
            _memory(
                block_size=256,
                prefix_cache=_prefix_cache(
                    publish="schedule",
                    reuse_order="fifo",
                    duplicates="keep_last",
                    release_order="head_first",
                    retain_freed=False,
                ),
            ),
        ),
    ),
    Preset(
        name="nano-vllm-rs",
        summary="The Rust nano-vllm according to its documentation, with preemption on and host memory to swap to.",
        source="nano-vllm-rs, SchedulerConfig and EngineConfig",
        scheduling=_scheduling(
            "priority",
            {
                "policy": "nano_vllm_rs",
                "params": {
                    "prefill_budget_tokens": 4096,
                    "chunked_prefill": True,
                    "chunk_size": 512,
                    "preemption": True,
                },
            },
        ),
        replica=_replica(256, None, _memory(host_blocks=1024, prefix_cache=NO_PREFIX_CACHE)),
    ),
    Preset(
        name="sarathi",
        summary="Sarathi-Serve: stall-free batching with chunks of 512 tokens, as in its paper and in the Vidur simulator.",
        source="Sarathi-Serve (OSDI'24); Vidur's SarathiSchedulerConfig",
        scheduling=_scheduling("fcfs", {"policy": "fixed_chunk", "params": {"chunk_size": 512}}),
        replica=_replica(128, None, _memory(watermark_fraction=0.01, prefix_cache=NO_PREFIX_CACHE)),
    ),
    Preset(
        name="orca",
        summary="ORCA: iteration-level batching; memory for the longest output is reserved at admission.",
        source="ORCA (OSDI'22); batch limit of Vidur's OrcaSchedulerConfig",
        scheduling=_scheduling("fcfs", "orca"),
        replica=_replica(128, None, _memory(prefix_cache=NO_PREFIX_CACHE)),
    ),
    Preset(
        name="vajra",
        summary="Vajra: least relative slack first, late binding, chunks sized to a target step time.",
        source="Vajra's scheduling architecture",
        scheduling=_scheduling("lrs", "dynamic_chunk", "pull"),
        replica=_replica(128, None, _memory(watermark_fraction=0.01)),
    ),
]
