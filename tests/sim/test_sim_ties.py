"""Is it the same whether repeating steps are worked out at once, when requests arrive at the very tick at which steps end?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vajra_py.config import config_from_mapping
from vajra_py.experiment.run import run_experiment


@pytest.mark.parametrize("chooser", ["round_robin", "least_loaded", "power_of_two", "prefix_affinity", "pull"])
@pytest.mark.parametrize("seed", range(4))
def test_ties_are_settled_in_the_same_order(chooser: str, seed: int, tmp_path: Path) -> None:
    stream = np.random.default_rng(seed)
    arrivals = sorted(int(tick) for tick in stream.integers(0, 120, 40))
    rows = [
        {
            "request_id": f"r{index}",
            "arrived_at": tick * 0.01,  # steps take 10 ms, so every arrival falls on the end of some
            "num_prompt_tokens": int(stream.integers(1, 100)),
            "num_output_tokens": int(stream.integers(1, 60)),
            "expires_after_s": 0.5 if index % 5 == 0 else None,
        }
        for index, tick in enumerate(arrivals)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows))
    tables = []
    for watched in (True, False):  # nothing is worked out ahead where every step is logged
        config = config_from_mapping(
            {
                "version": 1,
                "num_replicas": 3,
                "scheduling": {
                    "request_prioritizer": "fcfs",
                    "replicaset_scheduler": chooser,
                    "replica_scheduler": "fixed_chunk",
                },
                "replica": {"max_batch_size": 4, "memory": {"block_size": 8, "num_blocks": 40}},
                "workload": {"type": "jsonl", "path": str(trace)},
                "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
                "output": {"decision_log": watched},
            }
        )
        run = run_experiment(config, folder=tmp_path / str(watched))
        order = [("replica_id", "ascending"), ("step_index", "ascending")]
        tables.append((run.requests().sort_by("index").to_pydict(), run.steps().sort_by(order).to_pydict()))
    np.testing.assert_equal(tables[0], tables[1])
