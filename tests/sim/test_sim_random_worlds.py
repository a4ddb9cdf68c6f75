"""Random worlds of everything at once: nothing is lost, equal runs are equal, and fast-forward changes nothing.

`python -m tests.sim.run_worlds` runs as many as are asked for.
"""

from __future__ import annotations

import pytest

from tests.sim.everything import check_world

DOWN_BEFORE_ITS_STEP = 18
"""A replica goes down in the tick in which it was to form a step; it must not take requests from the shared queue later."""
MOVED_WITH_A_RESERVATION = 29
"""A waiting prompt moves for which blocks of another replica are set aside."""
CALLED_BACK_WHILE_HELD_BACK = 4
"""A prompt is called back that waits for blocks of its target."""
WAIT_FOR_EACH_OTHER = 6106
"""Prompts that were pulled fill their source, and blocks for those that wait there fill the target."""
STEP_ENDS_WHILE_LET_IN = 6755
"""The admission policy lets a deferred request in when a step of another replica has just ended."""


@pytest.mark.parametrize(
    "seed",
    [
        DOWN_BEFORE_ITS_STEP,
        MOVED_WITH_A_RESERVATION,
        CALLED_BACK_WHILE_HELD_BACK,
        WAIT_FOR_EACH_OTHER,
        STEP_ENDS_WHILE_LET_IN,
        100,
        101,
        102,
    ],
)
def test_nothing_is_lost_whatever_happens_at_once(seed: int) -> None:
    assert check_world(seed) > 0


MIGRATES_TO_WHERE_IT_IS_TO_GO = 25
"""A running prompt migrates to the replica where blocks are set aside for it."""
HELD_WITHOUT_BLOCKS = 188
"""A request that has lost its target waits for blocks that prompts have which wait for its own."""
STAYS_IN_A_RUN = 311
"""A request is told to stay while its replica is in a run of steps that are worked out at once."""


@pytest.mark.parametrize("seed", [MIGRATES_TO_WHERE_IT_IS_TO_GO, HELD_WITHOUT_BLOCKS, STAYS_IN_A_RUN])
def test_nothing_is_lost_where_kv_is_sent_while_it_is_computed(seed: int) -> None:
    assert check_world(seed, overlaps=True) > 0


CAME_FROM_ANOTHER_REPLICA = 28
"""Tiers load by vLLM's rule, and who gives up its KV because nobody can run got it by a hand-off."""
MIGRATES_WHEN_HANDED_OFF = 99
"""A long prompt migrates, and its target has set blocks aside for it, when it is computed and handed off to the same replica."""
MIGRATES_TO_A_REPLICA_THAT_GOES_DOWN = 100
"""A replica drains and goes down that has set blocks aside for a request that migrates to it."""

GREW_BEYOND_ITS_PROMPTS_REPLICAS = 10020
"""A replica is lost, and prompt and output of one of its requests fit on no replica that computes prompts."""

WAIT_FOR_EACH_OTHERS_ADAPTERS = 10248
"""Requests leave two replicas for each other, whose only slots have the adapters of those that leave."""
LOADED_AND_NOT_LOOKED_AT = 10275
"""The last prompt is loaded from a tier, and its memory is full of requests that wait for its blocks elsewhere."""


@pytest.mark.parametrize(
    "seed",
    [
        WAIT_FOR_EACH_OTHERS_ADAPTERS,
        LOADED_AND_NOT_LOOKED_AT,
        CAME_FROM_ANOTHER_REPLICA,
        MIGRATES_WHEN_HANDED_OFF,
        MIGRATES_TO_A_REPLICA_THAT_GOES_DOWN,
        GREW_BEYOND_ITS_PROMPTS_REPLICAS,
    ],
)
def test_nothing_is_lost_where_requests_are_calls_of_agents(seed: int) -> None:
    assert check_world(seed, agents=True) > 0


ORCA_ALONE_WITH_PROMPTS = 1142
"""`orca` sets aside memory for outputs on replicas that have room for prompts alone."""
CHAMELEON_LOSES_A_REPLICA = 1176
"""`chameleon` has charged a request to its queue that was lost with its replica and waits again."""

PREEMPTS_FOR_WHO_LOADS = 1288
"""`nano_vllm_rs` admits a request for whose blocks another one asks that waits for its KV from a tier."""


@pytest.mark.parametrize("seed", [0, 1, ORCA_ALONE_WITH_PROMPTS, CHAMELEON_LOSES_A_REPLICA, PREEMPTS_FOR_WHO_LOADS])
def test_nothing_is_lost_whichever_built_in_policies_decide(seed: int) -> None:
    assert check_world(seed, agents=True, policies=True) > 0


HELD_BACK_WHEN_REPLACED = 5082
"""A prompt that is to be computed again waits for blocks of its target when the replicaset scheduler is replaced."""


@pytest.mark.parametrize("seed", [HELD_BACK_WHEN_REPLACED, 0, 1])
def test_nothing_is_lost_where_policies_are_replaced_and_replicas_drain_by_migration(seed: int) -> None:
    assert check_world(seed, swaps=True) > 0


def test_nothing_is_lost_where_policies_are_replaced_while_kv_is_sent() -> None:
    assert check_world(7000, swaps=True, overlaps=True) > 0
