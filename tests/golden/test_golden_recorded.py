"""Compare our replicas and pools with recorded runs of Dynamo's mocker, DistServe's simulator and splitwise-sim."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.golden.readers import Result, distserve, dynamo, splitwise
from tests.golden.readers.step_times import DistServeTimes, MockerFixed, MockerPolynomial, SplitwiseLinear
from vajra_py.config import hand_off
from vajra_py.contract import BatchFeatures

Compare = Callable[[str, str, Mapping[str, Any]], Result]

COLOCATED: Mapping[str, tuple[Compare, tuple[str, ...]]] = {
    "pd_dynamo": (dynamo.compare, ("agg_1w", "agg_1w_prefix", "agg_2w_tight")),
    "simdistserve": (distserve.compare, ("v_1w", "v_2w_chunked")),
    "splitwise": (splitwise.compare, ("jsq_4", "token_jsq_4")),
}
"""Runs whose replicas compute prompts and decode."""
NAMES = [(system, name) for system, (_, names) in COLOCATED.items() for name in names]


@pytest.fixture(scope="session")
def recorded_dir(shared_dir: Path) -> Path:
    folder = shared_dir / "recorded"
    if not folder.is_dir():
        pytest.skip(f"recorded runs absent: no folder {folder}")
    return folder


def read(folder: Path, system: str, name: str) -> dict[str, Any]:
    with gzip.open(folder / system / f"{name}.json.gz", "rt") as stream:
        trace: dict[str, Any] = json.load(stream)
    return trace


@pytest.mark.parametrize(("system", "name"), NAMES)
def test_every_request_of_a_colocated_run_is_as_recorded(recorded_dir: Path, system: str, name: str) -> None:
    trace = read(recorded_dir, system, name)
    result = COLOCATED[system][0](system, name, trace)
    assert result.difference is None, "\n".join(result.difference.lines())
    assert result.num_compared == len(trace["requests"])


POOLS: Mapping[str, tuple[Compare, tuple[str, ...]]] = {
    "pd_dynamo": (
        dynamo.compare,
        (
            *("base_1p1d", "base_1p3d", "base_2p2d", "base_3p1d", "block128_2p2d", "block16_1p1d", "both_tight_2p2d"),
            *("burst20_1p1d", "burst50_2p2d", "bw0_5_1p1d", "bw1_1p3d", "bw2_0_1p1d", "bw400_0_1p1d", "bw_none_1p1d"),
            *("chunk1024_long_2p1d", "chunk2048_1p1d", "chunk256_1p1d", "chunk512_1p1d", "dgrow_preempt_fifo"),
            *("dgrow_preempt_lifo", "dtight40_1p1d", "dtight64_2p1d", "dtight96_2p2d", "dtight_block16_1p1d"),
            *("fixed_times_1p1d", "fixed_times_2p2d", "gamma_3p1d", "maxseqs_p2_d4", "nochunk_1p1d", "one_token_1p1d"),
            *("prefix_groups_1p1d", "prefix_groups_3p1d_evict", "prefix_off_1p1d", "ptight_1p1d", "repeat_1p1d"),
            *("turns_2p2d", "turns_missing_1p1d"),
        ),
    ),
    "simdistserve": (
        distserve.compare,
        ("d_1p1d", "d_1p1d_tp2", "d_1p3d_bs", "d_2p1d_pp2", "d_2p2d", "d_3p1d_maxtok"),
    ),
    "splitwise": (
        splitwise.compare,
        (
            *("kv_jsq_2p2d", "kv_jsq_3p1d_slow", "kv_jsq_db_2p2d", "kv_round_robin_1p3d", "kv_token_jsq_2p2d"),
            *(
                "overlap_kv_jsq_2p2d",
                "mixed_pool_1p1d_loaded",
                "mixed_pool_2p2d",
                "mixed_pool_3p1d",
                "mixed_pool_preempt",
            ),
        ),
    ),
}
"""Runs with one pool for prompts and one for decodes."""


@pytest.mark.parametrize(("system", "name"), [(system, name) for system, (_, names) in POOLS.items() for name in names])
def test_every_request_of_a_run_with_two_pools_is_as_recorded(recorded_dir: Path, system: str, name: str) -> None:
    trace = read(recorded_dir, system, name)
    result = POOLS[system][0](system, name, trace)
    assert result.difference is None, "\n".join(result.difference.lines())
    assert result.num_compared == len(trace["requests"])


@pytest.mark.parametrize(
    ("name", "section", "change"),
    [
        ("dtight96_2p2d", "decode", {"num_gpu_blocks": 97}),
        ("base_2p2d", "prefill", {"kv_transfer_bandwidth": 49.0}),
        ("base_1p1d", "prefill", {"max_num_batched_tokens": 1024}),
        ("maxseqs_p2_d4", "decode", {"max_num_seqs": 5}),
        ("dgrow_preempt_lifo", "decode", {"preemption_mode": "fifo"}),
        ("turns_missing_1p1d", "prefill", {"kv_transfer_timing_mode": "destination_missing"}),
    ],
)
def test_other_settings_of_a_pool_are_noticed(
    recorded_dir: Path, name: str, section: str, change: Mapping[str, Any]
) -> None:
    trace = read(recorded_dir, "pd_dynamo", name)
    trace["config"][section].update(change)
    assert dynamo.compare("pd_dynamo", name, trace).difference is not None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixed_pool_3p1d", {"prompt_max_pending_batch_tokens": 8192}),
        ("mixed_pool_2p2d", {"transfer_bandwidth_gib_s": 190}),
        ("mixed_pool_preempt", {"max_preemptions": 3}),
    ],
)
def test_other_settings_of_a_mixed_pool_are_noticed(recorded_dir: Path, name: str, change: Mapping[str, Any]) -> None:
    trace = read(recorded_dir, "splitwise", name)
    trace["config"].update(change)
    assert splitwise.compare("splitwise", name, trace).difference is not None


def test_a_full_target_is_looked_at_again_once_a_second(recorded_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = read(recorded_dir, "splitwise", "mixed_pool_2p2d")
    late = [
        one for one in trace["requests"] if one["kv_start"] is not None and one["kv_start"] > one["prompt_end"] + 0.5
    ]
    assert late
    whole = [one["kv_start"] - one["prompt_end"] for one in late]
    assert whole == pytest.approx([round(one) for one in whole])
    rules = {**hand_off.PRESETS, "splitwise": {**hand_off.PRESETS["splitwise"], "when_full": "wait"}}
    monkeypatch.setattr(hand_off, "PRESETS", rules)
    assert splitwise.compare("splitwise", "mixed_pool_2p2d", trace).difference is not None


@pytest.mark.parametrize(
    ("system", "name", "section", "change"),
    [
        ("pd_dynamo", "agg_2w_tight", "engine", {"num_gpu_blocks": 81}),
        ("pd_dynamo", "agg_2w_tight", "engine", {"enable_prefix_caching": False}),
        ("pd_dynamo", "agg_1w", "engine", {"max_num_batched_tokens": 1023}),
        ("simdistserve", "v_2w_chunked", None, {"prefill_max_tokens": 511}),
        ("simdistserve", "v_1w", None, {"decode_max_tokens": 8}),
        ("splitwise", "jsq_4", None, {"max_batch_tokens": 1024}),
        ("splitwise", "token_jsq_4", None, {"max_preemptions": 0}),
        ("splitwise", "token_jsq_4", None, {"scheduler": "jsq"}),
    ],
)
def test_other_settings_are_noticed(
    recorded_dir: Path, system: str, name: str, section: str | None, change: Mapping[str, Any]
) -> None:
    trace = read(recorded_dir, system, name)
    settings = trace["config"] if section is None else trace["config"][section]
    assert settings.keys() >= change.keys()
    settings.update(change)
    assert COLOCATED[system][0](system, name, trace).difference is not None


@pytest.mark.parametrize(("system", "name"), NAMES[::2])
def test_one_late_request_is_noticed(recorded_dir: Path, system: str, name: str) -> None:
    trace = read(recorded_dir, system, name)
    trace["requests"][-1]["end"] += 1e-5
    result = COLOCATED[system][0](system, name, trace)
    assert result.difference is not None
    assert result.difference.field == "end"


# Step times, against figures measured one by one


def prefill(*chunks: tuple[int, int]) -> BatchFeatures:
    """Chunks of (tokens, tokens before)."""
    features = BatchFeatures()
    for tokens, before in chunks:
        features = features.with_chunk(tokens, before)
    return features


@pytest.mark.parametrize(
    ("features", "ms"),
    [
        (prefill((1000, 0)), 32.105859),
        (prefill((1024, 0)), 32.49071),
        (prefill((1024, 0), (1024, 0)), 49.36290),
        (prefill((64, 960)), 17.47489),
        (BatchFeatures().with_decodes(1, 1023), 5.79272),
        (prefill((1024, 0)).with_decodes(1, 519), 38.25749),
    ],
)
def test_step_times_of_the_mocker(features: BatchFeatures, ms: float) -> None:
    assert MockerPolynomial(16384 * 64).stage_time_s(features) * 1e3 == pytest.approx(ms, abs=1e-5)


def test_the_mocker_takes_the_sum_of_chunks_from_rounded_means() -> None:
    model = MockerPolynomial(16384 * 64)
    assert model.stage_time_s(prefill((700, 0), (900, 0))) == model.stage_time_s(prefill((1600, 0)))
    # 12 behind 3069 and 1011 behind 0: means 2046 and 1534 (of 1534.5), so that 1023 tokens count as 1024
    assert model.stage_time_s(prefill((12, 3069), (1011, 0))) == model.stage_time_s(prefill((1024, 0)))
    cut = model.stage_time_s(prefill((8192, 0))) + model.stage_time_s(prefill((2048, 8192)))
    assert cut * 1e3 == pytest.approx(218.49982, abs=1e-5)


def test_a_context_above_the_memory_counts_as_the_memory() -> None:
    """Shared blocks count for each of their users."""
    model = MockerPolynomial(1024)
    assert model.stage_time_s(BatchFeatures().with_decodes(3, 3000)) == pytest.approx((5.74 + 54.01 - 25.74) / 1e3)


def test_fixed_step_times_of_the_mocker() -> None:
    model = MockerFixed(20.0, 4.0)
    assert model.stage_time_s(prefill((9, 0), (1, 0))) == 0.020
    assert model.stage_time_s(BatchFeatures().with_decodes(7, 70)) == 0.004
    assert model.stage_time_s(prefill((9, 0)).with_decodes(7, 70)) == 0.024


OPT_13B = DistServeTimes(
    prefill=(18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
    decode_small=(19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
    decode_large=(7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
    threshold=95,
)


@pytest.mark.parametrize(
    ("prompt", "ms"),
    [
        (128, 34.2768),
        (256, 47.6844),
        (300, 52.3472),
        (512, 75.1999),
        (700, 96.0010),
        (900, 118.6826),
        (1024, 133.0313),
        (2000, 253.6161),
    ],
)
def test_prefill_times_of_distserve(prompt: int, ms: float) -> None:
    assert OPT_13B.stage_time_s(prefill((prompt, 0))) * 1e3 == pytest.approx(ms, abs=1e-4)


def test_decode_times_of_distserve() -> None:
    assert OPT_13B.stage_time_s(BatchFeatures().with_decodes(1, 512)) * 1e3 == pytest.approx(22.3460, abs=1e-4)
    prompts = (128, 256, 300, 512, 700, 900, 1024, 2000)
    all_at_once = OPT_13B.stage_time_s(prefill(*((prompt, 0) for prompt in prompts)))
    assert all_at_once * 1e3 == pytest.approx(663.1216, abs=1e-4)
    large = OPT_13B.stage_time_s(BatchFeatures().with_decodes(95, 9500))
    assert large * 1e3 == pytest.approx(7.1661889 + 0.0005798 * 9595 + 0.158310962 * 95 + 2.95, abs=1e-4)


def test_step_times_of_splitwise() -> None:
    model = SplitwiseLinear(prompt_base=0.02, prompt_token=0.00012, token_base=0.03, token_seq=0.0004)
    assert model.stage_time_s(prefill((792, 0))) == pytest.approx(0.11504)
    assert model.stage_time_s(BatchFeatures().with_decodes(2, 900)) == pytest.approx(0.0308)
    assert model.stage_time_s(prefill((622, 0)).with_decodes(1, 9)) == pytest.approx(0.09504)
