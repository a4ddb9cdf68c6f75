"""Splitwise's mixed pool: who lends whom a replica, and what that is for. Recorded runs are in tests/golden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.policies.routing_views import Replica, context
from tests.sim.split_pools import POLICIES, prepared, settings
from vajra_py.contract import EndedStep, Layer
from vajra_py.plugins import build_policy
from vajra_py.workload import RequestSpec


@dataclass(eq=False)
class Asked:
    """A request."""

    num_prompt_tokens: int = 100
    max_tokens: int = 50
    num_output_tokens: int = 0
    end_reason: Any = None


def router(**params: Any) -> Any:
    return build_policy(Layer.REPLICASET_SCHEDULER, "splitwise_mixed_pool", params, context(block_size=16))


def views(num_prompts: int = 2, num_tokens: int = 2, **waiting: int) -> list[Any]:
    """Replicas of 1,600 tokens; `r0=3`: three requests wait at replica 0."""
    pools = ["prompt"] * num_prompts + ["token"] * num_tokens
    return [Replica(one, pool=pool, num_waiting=waiting.get(f"r{one}", 0)) for one, pool in enumerate(pools)]


def place(made: Any, request: Asked, replicas: list[Any]) -> tuple[int, int]:
    prompt_at = made.assign(request, replicas, 0.0)
    return prompt_at, made.place_after_prompt(request, replicas, 0.0)


def computed(made: Any, request: Asked, replica_id: int) -> None:
    """The prompt's only step comes back, with its first token."""
    request.num_output_tokens = 1
    made.on_step_end(EndedStep(replica_id, 0, 0.0, 0.1, [request], [request.num_prompt_tokens]))  # type: ignore[list-item]


def test_prompts_go_by_pending_tokens_and_decodes_by_memory() -> None:
    made = router()
    long, short = Asked(1000), Asked(10)
    assert place(made, long, views()) == (0, 2)
    assert [place(made, Asked(10), views()) for _ in range(2)] == [(1, 3), (1, 3)]
    assert place(made, short, views())[1] == 3, "120 tokens are placed there, and 1,050 at the other"
    computed(made, long, 0)
    assert place(made, Asked(10), views()) == (0, 3), (
        "no prompt is pending at 0 any more, and the KV of its output is to be at 2"
    )
    long.end_reason = "stop"
    computed(made, long, 2)
    assert place(made, Asked(10), views())[1] == 2, "it has ended"


def test_a_request_that_moves_counts_where_it_went_and_there_alone() -> None:
    made, long = router(), Asked(1000)
    assert place(made, long, views()) == (0, 2)
    computed(made, long, 0)
    made.on_moved(long, 0, 3, 0.1)
    assert [place(made, Asked(300, 100), views())[1] for _ in range(4)] == [2, 2, 2, 3], "1,050 tokens are at 3"
    made.on_departures(list(made._scheduled.placed), 1.0)
    assert all((one.pending, one.memory, one.here) == (0, 0, {}) for one in made._scheduled.at.values())


def test_a_long_queue_borrows_a_replica_of_the_other_pool_until_that_is_idle() -> None:
    made = router(max_pending_prompt_tokens=150)
    assert place(made, Asked(), views(1, 2)) == (0, 1)
    assert place(made, Asked(), views(1, 2))[0] == 0, "nobody waits there"
    assert place(made, Asked(), views(1, 2, r0=1)) == (1, 1)
    assert place(made, Asked(), views(1, 2, r0=1))[0] == 1, "its queue is short"
    assert place(made, Asked(), views(1, 2, r0=1, r1=1))[0] == 2, "another one"
    made.on_departures([one for one in made._scheduled.placed if made._scheduled.placed[one].prompt_at == 1], 1.0)
    assert list(made._mixed) == [2]
    assert list(made._tokens) == [1]


def test_decodes_without_room_borrow_a_replica_for_prompts_and_at_last_everything_is_mixed() -> None:
    made = router()
    assert place(made, Asked(1000, 500), views(2, 1)) == (0, 2)
    assert place(made, Asked(100, 50), views(2, 1)) == (1, 1), "its prompt and its decodes are on one replica"
    assert place(made, Asked(1000, 450), views(2, 1)) == (0, 1)
    assert list(made._mixed) == [1]
    assert place(made, Asked(1000, 500), views(2, 1)) == (0, 0), "the last replica is lent"
    assert place(made, Asked(1000, 500), views(2, 1)) == (2, 2), "nobody has room: the fewest pending tokens of all"


def test_a_replica_that_is_down_gets_nothing_and_what_was_to_go_there_goes_elsewhere() -> None:
    made, request = router(), Asked()
    replicas = views()
    assert made.assign(request, replicas, 0.0) == 0
    replicas[2].is_up = False
    assert made.place_after_prompt(request, [replicas[1], replicas[3]], 0.0) in (1, 3)
    made.on_departures([request], 1.0)
    assert all((one.pending, one.memory, one.here) == (0, 0, {}) for one in made._scheduled.at.values())
    assert made.assign(Asked(), [Replica(0, pool="prompt", is_up=False)], 0.0) is None


def serve(router: str) -> tuple[float, int]:
    """P99 of the time to first token under bursts of prompts, and how many replicas computed prompts."""
    role = "mixed" if router == "splitwise_mixed_pool" else None
    pools = {name: {"num_replicas": 2, "role": role or of} for name, of in (("prompt", "prefill"), ("token", "decode"))}
    params = {"max_pending_prompt_tokens": 4096} if role else {}
    mapping = settings(
        pools=pools,
        scheduling={**POLICIES, "replicaset_scheduler": {"policy": router, "params": params}},
        hand_off={"preset": "splitwise", "kv_bytes_per_token": 100_000},
        replica={"memory": {"num_blocks": 4000}, "max_batch_tokens": 2048},
    )
    run, simulator, ways = prepared(mapping)
    times = np.sort(np.concatenate([np.arange(0, 40, 0.5), *(np.full(30, at) + 0.01 for at in (5.0, 15.0, 25.0))]))
    specs = [RequestSpec(f"r{one}", float(at), 1500, 60) for one, at in enumerate(times)]
    simulator.run(specs)
    assert run.controller.num_alive == 0
    waits = [(ways.of[one.request_id].first_token or 0.0) - one.arrived_at for one in specs]
    first = {ways.of[one.request_id].assigned[0] for one in specs}
    return float(np.quantile(waits, 0.99)), len(first)


def test_the_mixed_pool_absorbs_bursts() -> None:
    """Splitwise, section 4.4: queues of prompts are worked off by both pools."""
    fixed, lent = serve("least_loaded"), serve("splitwise_mixed_pool")
    assert (fixed[1], lent[1]) == (2, 4)
    assert lent[0] < 0.75 * fixed[0]
