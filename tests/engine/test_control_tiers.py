"""A host tier on the engine: content that the device gave up comes back, every token is as without it, and replays are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_control_pools import RARELY, check, run_it
from tests.engine.test_control_replay import SESSIONS, layers, settings
from vajra_py.config import config_from_mapping
from vajra_py.config.replica import ReplicaConfig
from vajra_py.engine.build import _check_transfers, _dry_controller
from vajra_py.engine.config import EngineConfig, check_tiers
from vajra_py.engine.services import engine_services
from vajra_py.errors import ConfigError
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.input_log import TierEnd, read_inputs
from vajra_py.runtime.serving.build import ModelFacts

CHATS = {**SESSIONS, "num_sessions": 16}
RULES: list[dict[str, Any]] = [
    {"write": "write_back"},
    {"write": "write_through"},
    {"write": "write_through_selective"},
]


def tiered(
    model: Path, rules: dict[str, Any] | None, batcher: Any = "vllm_v1", of_all: dict[str, Any] | None = None, **sections: Any
) -> dict[str, Any]:
    """An experiment with chats whose prefixes do not fit on the device."""
    mapping = settings(model, layers("fcfs", "prefix_affinity", batcher), CHATS, **sections)
    if rules is not None:
        level = {"name": "host", "num_blocks": 60, "bandwidth_gb_s": 1.0, **rules}
        mapping["replica"]["memory"]["tiers"] = {"levels": [level], **(of_all or {})}
    return mapping


def hits(run: RunData) -> int:
    """Prompt tokens that came from the host."""
    return sum(run.requests().column("hit_tokens_host").to_pylist())


@pytest.mark.parametrize("rules", RULES, ids=[one["write"] for one in RULES])
def test_content_comes_back_from_the_host(rules: dict[str, Any], hollow_model: Path, tmp_path: Path) -> None:
    run, made = run_it(tiered(hollow_model, rules), tmp_path / "run", abort_rate=RARELY)
    happened = check(made, tmp_path / "run")
    assert happened["TierEnd"] > 20
    assert hits(run) > 100
