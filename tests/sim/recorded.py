"""Recorded runs of the mechanism: `python -m tests.sim.recorded --write` records them anew.

Random worlds of everything at once, and small worlds each of which has a part of the mechanism that those have not.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.policies.recorded_settings import ADAPTED, CHATS, DRAFTED, MEMORY, POOLS, PROGRAMS
from tests.policies.recorded_worlds import DEEP, PLAIN, World, merged, of_scenario, record
from tests.records import Record, read_records, write_records
from tests.sim.everything import drawn_world, run_world
from vajra_py.testing import scenarios

FILE = Path(__file__).with_name("recorded.json")
COMMAND = "python -m tests.sim.recorded --write"
SEEDS = range(14)
"""Seeds of random worlds, each with and without KV that is sent while it is computed."""


def _memory(**keys: object) -> DEEP:
    return {"replica": {"memory": keys}}


def _cache(**keys: object) -> DEEP:
    return _memory(prefix_cache=keys)


def _tiers(*levels: DEEP, **keys: object) -> DEEP:
    each = {"bandwidth_gb_s": 0.05, "latency_s": 0.001}
    named = [{"name": f"tier{index}", **each, **one} for index, one in enumerate(levels)]
    return _memory(tiers={"kv_bytes_per_token": 10_000, "levels": named, **keys})


_HOST, _SMALL, _DISK = {"num_blocks": 30}, {"num_blocks": 8}, {"num_blocks": 80}
_SWAPS: DEEP = {"scheduling": {"replica_scheduler": {"policy": "fixed_chunk", "params": {"preemption": "swap"}}}}
_MOVES: DEEP = {
    "scheduling": {"replicaset_scheduler": {"policy": "llumnix", "params": {"migrate_below": 20.0}}},
    "num_replicas": 3,
    "hand_off": {"kv_bytes_per_token": 100_000},
    "links": {"bandwidth_gb_s": 0.1},
    "migration": {"last_stage_max_blocks": 1},
}
LONG_ANSWERS = World(of_scenario(scenarios.STARVED, 6), {"replica": {"memory": {"num_blocks": 24}}})
MECHANISMS: Mapping[str, tuple[World, DEEP]] = {
    "write_back": (PROGRAMS, _tiers(_HOST)),
    "exclusive": (PROGRAMS, _tiers({**_HOST, "exclusive": True})),
    "write_through": (PROGRAMS, _tiers({**_HOST, "write": "write_through"}, _DISK)),
    "selective": (MEMORY, _tiers({**_HOST, "write": "write_through_selective", "after_uses": 3})),
    "prefetch_timeout": (PROGRAMS, _tiers(_SMALL, _DISK, prefetch="timeout", prefetch_timeout_s=0.002)),
    "prefetch_best_effort": (PROGRAMS, _tiers(_SMALL, _DISK, prefetch="best_effort")),
    "shared_tier": (
        PROGRAMS,
        {"num_replicas": 2, **_tiers(_HOST, {**_DISK, "shared": True, "shared_bandwidth_gb_s": 0.05})},
    ),
    "reserved_loads": (PROGRAMS, _tiers(_HOST, loads="reserved", load_order="urgency", prompts_only=True)),
    "tiers_of_vllm": (MEMORY, _tiers(_HOST, preset="vllm_offloading")),
    "tiers_of_sglang": (PROGRAMS, _tiers(_SMALL, _DISK, preset="sglang_hicache")),
    "swaps": (MEMORY, _SWAPS),
    "swap_link": (MEMORY, merged(_SWAPS, _memory(swap_link={"bandwidth_gb_s": 0.05, "kv_bytes_per_token": 10_000}))),
    "swap_buffer": (
        MEMORY,
        merged(_SWAPS, _memory(swap_link={"bandwidth_gb_s": 0.05, "kv_bytes_per_token": 10_000, "frees": "at_once"})),
    ),
    "published_late": (MEMORY, _cache(publish="step_end", duplicates="keep_last")),
    "reused_in_turn": (MEMORY, _cache(reuse_order="fifo", release_order="head_first")),
    "not_retained": (MEMORY, _cache(retain_freed=False)),
    "last_hit_dropped": (PROGRAMS, _cache(drop_last_hit=True)),
    "not_withdrawn": (MEMORY, _cache(unscheduled="keep")),
    "no_cache": (MEMORY, _cache(enabled=False)),
    "incremental": (CHATS, _memory(reservation="incremental", watermark_fraction=0.1)),
    "tenant_salt": (MEMORY, _memory(tenant_salt=True)),
    "late_events": (
        PROGRAMS,
        {"num_replicas": 3, "kv_event_lag_s": 0.05, "scheduling": {"replicaset_scheduler": "prefix_affinity"}},
    ),
    "late_views": (CHATS, {"num_replicas": 3, "view_interval_s": 0.05}),
    "queue_bounds": (CHATS, {"admission": {"max_queued_requests": 8, "max_queued_tokens": 500}}),
    "overhead": (CHATS, {"backend": {"simulator": {"scheduling_overhead_s": 0.001}}}),
    "three_stages": (CHATS, {"backend": {"simulator": {"latency": {"num_stages": 3}}}}),
    "kv_groups": (
        CHATS,
        {
            "replica": {
                "kv_parallel": {"groups": 2, "group_tokens": 96, "busy_tokens": 40},
                "memory": {"prefix_cache": {"enabled": False}},
            }
        },
    ),
    "adapters": (CHATS, ADAPTED),
    "any_adapters": (CHATS, {"replica": {"adapters": {"max_loras": 2, "models": None}}}),
    "drafts": (CHATS, DRAFTED),
    "drafts_that_stay": (
        MEMORY,
        merged(
            DRAFTED, {"replica": {"draft": {"rejected_blocks": "keep", "past_max_tokens": True, "lookahead_tokens": 2}}}
        ),
    ),
    "padded_drafts": (MEMORY, merged(DRAFTED, {"replica": {"draft": {"pad_admitted": True, "publish": "schedule"}}})),
    "migrations": (LONG_ANSWERS, _MOVES),
    "short_migrations": (
        LONG_ANSWERS,
        merged(_MOVES, {"migration": {"max_stages": 1, "last_stage_max_blocks": 0, "max_per_replica": 3}}),
    ),
    **{
        f"pools_of_{one}": (CHATS, merged(POOLS, {"hand_off": {"preset": one}}))
        for one in ("vllm-pd", "sglang-pd", "dynamo-pd", "distserve", "splitwise")
    },
}
"""Requests and settings that have a part of the mechanism, by its name."""


def subjects() -> list[str]:
    """Return the names of all worlds."""
    return [*(f"random {seed}" for seed in SEEDS), *MECHANISMS]


def run(subject: str) -> dict[str, Record]:
    """Run a world in its two ways: overlapping or not, or with decodes worked out at once and step by step."""
    kind, _, seed = subject.partition(" ")
    if seed:
        return {"plain": _drawn(int(seed), overlaps=False), "overlaps": _drawn(int(seed), overlaps=True)}
    world, settings = MECHANISMS[kind]
    all_settings = merged(PLAIN, world.settings, settings)
    return {
        "runs": record(all_settings, world.requests(), every_step=False),
        "steps": record(all_settings, world.requests(), every_step=True),
    }


def _drawn(seed: int, *, overlaps: bool) -> Record:
    ways, num_steps = run_world(drawn_world(seed, 30, overlaps=overlaps), steps_alone=False)
    digest = hashlib.sha256(repr((ways.order, sorted(ways.of.items()))).encode()).hexdigest()[:6]
    return Record(digest, num_steps, 0, round(max(at for _, _, at in ways.order), 2))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or compare with it; exit code 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record anew; else compare")
    options = parser.parse_args(arguments)
    new = {name: run(name) for name in subjects()}
    if options.write:
        write_records(FILE, new)
        return 0
    old = read_records(FILE)
    found = [name for name, rows in new.items() if rows != old.get(name)]
    print("\n".join(f"{name} differs" for name in found) or "nothing differs")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
