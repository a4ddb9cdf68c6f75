"""Hybrid models: layers that keep a state of each request, with vLLM's KV manager as the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as kv

from tests.vllm.core import STATE, kv_cache, make_scheduler, vllm_config
from tests.vllm.fuzz import compare
from tests.vllm.worker_model import ExpectedTokens, KvSlots, WorkerFault
from vajra_py.errors import ConfigError
from vajra_py.vllm import Scheduler
from vajra_py.vllm.managed_kv import ManagedKv
from vajra_py.vllm.model_facts import kv_bytes_per_token_of, layer_specs_of
from vajra_py.vllm.support import block_size_of


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(3_000_000, 3_000_008))
def test_a_session_is_vllms_and_its_messages_are_carried_out(tiny_model: str, seed: int, is_async: bool) -> None:
    found, _ = compare(tiny_model, seed, is_async=is_async, kind="states")
    assert found is None


def scheduler_of(model: str, windows: tuple[int | None, ...]) -> Scheduler:
    config = vllm_config(model, max_model_len=256, enable_prefix_caching=False)
    made: Scheduler = make_scheduler(Scheduler, config, 61, 8, cache=kv_cache(61, 8, windows, 256))
    return made


def test_policies_see_blocks_of_attention_and_a_request_has_one_block_for_each_group_of_states(tiny_model: str) -> None:
    scheduler = scheduler_of(tiny_model, (None, STATE, STATE))
    replica = scheduler.mechanism.replica
    assert isinstance(replica.memory, ManagedKv)
    assert replica.limits.block_size == 8
    assert [replica.memory.blocks_for(count) for count in (1, 8, 9, 256)] == [3, 3, 4, 34]
    scheduler.shutdown()


def test_states_do_not_count_as_kv_of_tokens() -> None:
    with_states, without = kv_cache(10, 16, (None, STATE), 256), kv_cache(10, 16, (None,), 256)
    assert block_size_of(with_states, 256) == block_size_of(without, 16) == 16
    assert block_size_of(kv_cache(10, 16, (STATE,), 256), 256) == 256
    every, attention = (kv_bytes_per_token_of(layer_specs_of(one), 16) for one in (with_states, without))
    assert every == attention > 0


def test_prefix_caching_of_states_is_refused_by_the_cache_too(tiny_model: str) -> None:
    """The configuration of this model has no word of states, and its cache has."""
    config = vllm_config(tiny_model, max_model_len=256, enable_prefix_caching=True)
    state = kv.MambaSpec(block_size=16, shapes=((16, 128),), dtypes=(torch.float32,), mamba_cache_mode="align")
    sizes: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    groups = [
        kv.KVCacheGroupSpec([f"layer {at}"], one) for at, one in enumerate((kv.FullAttentionSpec(**sizes), state))
    ]
    cache = kv.KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching"):
        make_scheduler(Scheduler, config, 40, 16, cache=cache)


# The workers' model detects the errors that it is meant to detect


def expected() -> ExpectedTokens:
    return ExpectedTokens(tuple(range(20)), "", lambda position: position)


def test_a_state_is_one_block_and_follows_the_token_before() -> None:
    slots = KvSlots(4, (None, STATE))
    slots.check_tables("a", [[1, 2], [3]], 0, 6)
    with pytest.raises(WorkerFault, match="2 blocks for a state"):
        slots.check_tables("a", [[1, 2], [3, 4]], 0, 6)
    slots.write("a", expected(), [[1, 2], [3]], 0, 6)
    slots.write("a", expected(), [[1, 2], [3]], 6, 7)
    with pytest.raises(WorkerFault, match="not that after the token before"):
        slots.write("a", expected(), [[1, 2], [3]], 6, 7)
    with pytest.raises(WorkerFault, match="write one state"):
        slots.write("b", expected(), [[5, 6], [3]], 0, 1)
