"""May policies be told other step times than steps take, and do equal steps of a profile differ?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vajra_py.config import config_from_mapping
from vajra_py.contract import BatchFeatures
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency import Profile, Variation
from vajra_py.latency.models.fitting import Measured, fit_steps

TRUE = {"type": "affine", "base_s": 0.004, "per_token_s": 0.0002}
TOLD = {"type": "affine", "base_s": 0.004, "per_token_s": 0.0004}


def steps_of(
    folder: Path, scheduler: Any, seed: int = 0, system: dict[str, Any] | None = None, **simulator: Any
) -> list[dict[str, Any]]:
    """The steps of a simulation of a few requests. `system`: further keys of the file."""
    config = config_from_mapping(
        {
            "version": 1,
            "seed": seed,
            "scheduling": {
                "request_prioritizer": "fcfs",
                "replicaset_scheduler": "round_robin",
                "replica_scheduler": scheduler,
            },
            "replica": {"memory": {"num_blocks": 400}},
            "workload": {
                "type": "synthetic",
                "arrivals": {"type": "at_once"},
                "num_requests": 4,
                "prompt_tokens": {"type": "constant", "value": 700},
                "output_tokens": {"type": "constant", "value": 300},
            },
            "backend": {"simulator": simulator},
            **(system or {}),
        }
    )
    steps: list[dict[str, Any]] = run_experiment(config, folder=folder).steps().to_pylist()
    return steps


def test_policies_plan_with_what_they_are_told_and_steps_take_what_they_take(tmp_path: Path) -> None:
    dynamic = {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.05}}
    right = steps_of(tmp_path / "right", dynamic, latency=TRUE)
    wrong = steps_of(tmp_path / "wrong", dynamic, latency=TRUE, predictions=TOLD)
    as_told = steps_of(tmp_path / "told", dynamic, latency=TOLD)
    chunks = [[step["prefill_tokens"] for step in steps] for steps in (right, wrong, as_told)]
    assert chunks[1] == chunks[2] != chunks[0]
    for step in wrong:
        num_tokens = step["decode_tokens"] + step["prefill_tokens"]
        assert step["duration_s"] == pytest.approx(0.004 + 0.0002 * num_tokens)


def test_predictions_of_a_pool_are_not_those_of_the_next_replicaset(tmp_path: Path) -> None:
    dynamic = {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.05}}
    pools = {"pools": {"only": {"role": "mixed"}}}
    system = {"replicasets": {"a": {"select": {"slo_classes": ["x"]}, **pools}, "b": {}}}
    own = {"a": {"pools": {"only": {"predictions": TOLD}}}, "b": {}}
    alone = steps_of(tmp_path / "alone", dynamic, system=system, latency=TRUE)
    beside = steps_of(tmp_path / "beside", dynamic, system=system, latency=TRUE, replicasets=own)
    assert {step["replicaset"] for step in beside} == {"b"}
    assert beside == alone


def test_a_recording_needs_predictions_for_policies_that_ask(tmp_path: Path) -> None:
    dynamic = {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.05}}
    recorded = steps_of(tmp_path / "recorded", dynamic, latency=TRUE)
    steps = {"type": "recorded", "steps": str(tmp_path / "recorded" / "steps.parquet")}
    assert steps_of(tmp_path / "replayed", dynamic, latency=steps, predictions=TRUE) == recorded
    with pytest.raises(Exception, match=r"Set backend\.simulator\.predictions"):
        steps_of(tmp_path / "unasked", dynamic, latency=steps)


def test_predictions_are_of_as_many_stages(tmp_path: Path) -> None:
    staged = {"type": "constant", "num_stages": 2}
    with pytest.raises(ConfigError, match=r"backend\.simulator\.predictions: is of 2 pipeline stages") as caught:
        steps_of(tmp_path / "run", "fixed_chunk", latency=TRUE, predictions=staged)
    assert len(caught.value.problems) == 1


def test_equal_steps_of_a_profile_differ_by_seed_unless_they_are_not_to(tmp_path: Path) -> None:
    shapes = [BatchFeatures(rows, rows * context) for rows in (1, 2, 4) for context in (10, 100, 1000)]
    fit = fit_steps([Measured(shape, 0.01) for shape in shapes])
    profile = tmp_path / "profile.json"
    Profile(fit, {}, variation=Variation((0.5, 0.9, 1.1, 1.5), (0.2, 1.8))).write(profile)
    latency = {"type": "profiled", "path": str(profile)}

    def times(name: str, seed: int = 0, **more: Any) -> list[float]:
        steps = steps_of(tmp_path / name, "fixed_chunk", seed, latency={**latency, **more})
        prompts = [step["duration_s"] / 0.01 for step in steps if step["num_prefills"]]
        assert {round(one, 6) for one in prompts} <= ({1.0} if more else {0.2, 1.8})
        return [step["duration_s"] for step in steps if step["num_decodes"] == 4 and not step["num_prefills"]]

    varied = times("varied")
    assert {round(one, 6) for one in varied} == {0.005, 0.009, 0.011, 0.015}
    assert np.mean(varied) == pytest.approx(0.01, rel=0.1)
    assert times("again") == varied
    assert times("other", seed=1) != varied
    assert {round(one, 6) for one in times("steady", variation=False)} == {0.01}
