"""Replications: every setting under the same seeds, each a run of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vajra_py.api as api
from vajra_py.config import config_from_mapping, dump_effective, expand_sweep, load_config
from vajra_py.errors import ConfigError

MAPPING: dict[str, Any] = {
    "version": 1,
    "name": "small",
    "seed": 7,
    "scheduling": {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 512}},
    },
    "workload": {"type": "profile", "profile": "azure2023_conv", "num_requests": 20, "rate": 4},
    "backend": {"simulator": {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}}},
}


def test_every_point_is_run_under_the_same_seeds() -> None:
    sweep = {"scheduling.request_prioritizer": ["fcfs", "lrs"]}
    points = expand_sweep(config_from_mapping(MAPPING | {"sweep": sweep, "replications": 3}))
    assert [(one.scheduling.request_prioritizer.policy, one.seed) for _, one in points if one.scheduling] == [
        (policy, seed) for policy in ("fcfs", "lrs") for seed in (7, 8, 9)
    ]
    assert all(one.is_single for _, one in points)
    assert len({point.point_id for point, _ in points}) == 6


def test_more_replications_keep_the_folders_of_the_first_ones() -> None:
    ids = [
        [point.point_id for point, _ in expand_sweep(config_from_mapping(MAPPING | {"replications": count}))]
        for count in (2, 4)
    ]
    assert ids[0] == ids[1][:2]


def test_replications_survive_being_written_and_read(tmp_path: Path) -> None:
    config = config_from_mapping(MAPPING | {"replications": 3})
    (tmp_path / "again.yaml").write_text(dump_effective(config))
    assert [one.seed for _, one in expand_sweep(load_config(tmp_path / "again.yaml"))] == [7, 8, 9]
    # Without the tree that it was made from, as in another process.
    plain = type(config).model_validate(config.model_dump())
    assert [one.seed for _, one in expand_sweep(plain)] == [7, 8, 9]


def test_an_experiment_of_one_setting_is_replicated_and_compared_as_one(tmp_path: Path) -> None:
    config = api.load(MAPPING | {"replications": 3, "output": {"dir": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"replications: this experiment is more than one run"):
        api.run(config)
    result = api.sweep(config, workers=1)
    comparison = api.compare(result.runs)
    assert (comparison.names, comparison.replications) == (("small",), (3,))
    assert comparison.interval("ttft_mean_s", 0) is not None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"replications": 2, "sweep": {"seed": [1, 2]}}, r"replications: replications and a sweep of the seed"),
        ({"replications": 0}, r"replications: must be greater than 0 \(got 0\)"),
        ({"replications": 100_000}, r"replications: must be at most 1000 \(got 100000\)"),
        ({"replications": "many"}, r"replications: must be .*integer \(got 'many'\)"),
        ({"sweep": {"replications": [1, 2]}}, r"'replications' cannot be swept"),
        ({"replications": 2, "seed": "seven"}, r"seed: must be"),
    ],
)
def test_what_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_mapping(MAPPING | extra)


def test_a_warm_up_is_left_out_where_mser_finds_one_and_nothing_where_not(tmp_path: Path) -> None:
    """A burst at the start is worked off; what comes after it is steady."""
    burst = {"type": "piecewise", "pieces": [{"duration_s": 10, "rate": 60}, {"duration_s": 400, "rate": 2}]}
    workload = {
        "type": "synthetic",
        "arrivals": burst,
        "duration_s": 410,
        "prompt_tokens": {"type": "constant", "value": 400},
        "output_tokens": {"type": "constant", "value": 60},
    }
    runs = {}
    for warmup in ("auto", 0):
        simulator = MAPPING["backend"]["simulator"] | {"warmup_requests": warmup}
        given = MAPPING | {"workload": workload, "backend": {"simulator": simulator}}
        runs[warmup] = api.run(api.load(given), folder=tmp_path / str(warmup)).summary
    assert runs["auto"].value("window.start_s") > 5
    assert runs[0].value("window.start_s") < 1
    assert runs["auto"].value("overall.e2e_s.mean") < runs[0].value("overall.e2e_s.mean")
    with pytest.raises(ConfigError, match="warmup_requests"):
        api.load(MAPPING | {"backend": {"simulator": MAPPING["backend"]["simulator"] | {"warmup_requests": "some"}}})
