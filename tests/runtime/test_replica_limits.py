"""Sizes of a replica: what the settings say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from vajra_py.config.replica import ReplicaConfig
from vajra_py.errors import ConfigError
from vajra_py.latency import ConstantModel
from vajra_py.runtime.serving.build import ModelFacts, ReplicaLimits, replica_limits


def limits(prefix_cache: bool = False, **settings: Any) -> ReplicaLimits:
    memory = {"num_blocks": 12, "block_size": 16, "prefix_cache": {"enabled": prefix_cache}}
    return replica_limits(
        ReplicaConfig.model_validate({"memory": memory, **settings}), ConstantModel(0.01), ModelFacts()
    )


def test_groups_hold_a_number_of_tokens_of_one_request() -> None:
    found = limits(kv_parallel={"groups": 2, "group_tokens": 64})
    assert (found.kv_parallel_groups, found.kv_group_tokens) == (2, 64)
    alone = limits(kv_parallel={"groups": 1, "group_tokens": 64})
    assert (alone.kv_parallel_groups, alone.kv_group_tokens) == (1, None)


@pytest.mark.parametrize(
    ("group_tokens", "prefix_cache", "words"),
    [(65, False, "not a multiple of the block size .65 of 16"), (64, True, "no prefix cache with KV parallelism")],
)
def test_what_groups_cannot_do_is_refused(group_tokens: int, prefix_cache: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        limits(prefix_cache, kv_parallel={"groups": 2, "group_tokens": group_tokens})
    limits(prefix_cache, kv_parallel={"groups": 1, "group_tokens": group_tokens})


def test_a_request_may_not_have_more_tokens_in_a_group_than_fit() -> None:
    assert limits(kv_parallel={"groups": 2, "group_tokens": 96}).kv_group_tokens == 96
    with pytest.raises(
        ConfigError, match=r"kv_parallel\.group_tokens: is more than .* \(got 112\)\. Allowed: at most 96"
    ):
        limits(kv_parallel={"groups": 2, "group_tokens": 112})


def test_blocks_have_to_come_from_somewhere() -> None:
    nothing = ReplicaConfig.model_validate({})
    with pytest.raises(ConfigError, match="num_blocks"):
        replica_limits(nothing, ConstantModel(0.01), ModelFacts())
    found = replica_limits(nothing, ConstantModel(0.01), ModelFacts(lambda size, fraction: 70))
    assert found.num_blocks == 70
