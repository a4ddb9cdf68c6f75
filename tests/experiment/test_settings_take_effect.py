"""What each setting of a simulated experiment changes, on a run small enough to be worked out by hand.

Ten requests come a second apart, with prompts of 100 tokens and answers of 5; a step takes 0.1 s. So each has its first token
after 0.1 s and its last after 0.5 s, and is alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vajra_py.config import config_from_mapping
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.results import asked_rate
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData

BASE: dict[str, Any] = {
    "version": 1,
    "scheduling": {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 512}},
    },
    "replica": {"max_batch_size": 4, "max_model_len": 1000, "memory": {"num_blocks": 100}},
    "workload": {
        "type": "synthetic",
        "arrivals": {"type": "fixed", "rate": 1.0},
        "num_requests": 10,
        "prompt_tokens": {"type": "constant", "value": 100},
        "output_tokens": {"type": "constant", "value": 5},
    },
    "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.1}}},
}
Ran = Callable[..., RunData]


@pytest.fixture
def ran(tmp_path: Path) -> Ran:
    """The run with these settings changed, by path."""
    count = 0

    def run(changes: Mapping[str, Any] | None = None) -> RunData:
        nonlocal count
        count += 1
        config = config_from_mapping(BASE, [f"{path}={value}" for path, value in (changes or {}).items()])
        return run_experiment(config, folder=tmp_path / str(count))

    return run


def column(run: RunData, name: str) -> list[Any]:
    values: list[Any] = run.requests(name).column(name).to_pylist()
    return values


def num_arrived(run: RunData) -> int:
    return int(run.summary.value("overall.counts.arrived"))


def test_the_run_is_what_it_says(ran: Ran) -> None:
    run = ran()
    assert column(run, "ttft_s") == pytest.approx([0.1] * 10)
    assert column(run, "e2e_s") == pytest.approx([0.5] * 10)
    arrived = column(run, "arrived_at")
    assert [after - before for before, after in pairwise(arrived)] == pytest.approx([1.0] * 9)
    assert num_arrived(run) == 10
    assert Counter(column(run, "reason")) == {"stop": 10}


# The simulator


@pytest.mark.parametrize(
    ("setting", "value", "num_counted"),
    [
        ("warmup_s", 0, 10),
        ("warmup_s", 0.5, 9),
        ("warmup_s", 3, 7),
        ("warmup_requests", 4, 6),
        ("warmup_requests", 100, 1),
        ("warmup_requests", "auto", 10),
    ],
)
def test_a_warm_up_is_served_and_not_counted(setting: str, value: Any, num_counted: int, ran: Ran) -> None:
    run = ran({f"backend.simulator.{setting}": value})
    assert run.requests().num_rows == 10
    assert num_arrived(run) == num_counted


def test_of_two_warm_ups_the_longer_counts(ran: Ran) -> None:
    both = {"backend.simulator.warmup_s": 5, "backend.simulator.warmup_requests": 2}
    assert num_arrived(ran(both)) == 5
    assert num_arrived(ran({**both, "backend.simulator.warmup_requests": 8})) == 2


def test_nobody_arrives_after_the_horizon_and_who_is_there_is_served(ran: Ran) -> None:
    run = ran({"backend.simulator.horizon_s": 5.25})
    arrived = column(run, "arrived_at")
    assert max(arrived) <= 5.25
    assert len(arrived) in (5, 6)
    assert set(column(run, "reason")) == {"stop"}


def test_without_draining_a_run_ends_at_its_horizon(ran: Ran) -> None:
    whole = ran()
    fourth = column(whole, "arrived_at")[3]
    run = ran({"backend.simulator.horizon_s": fourth + 0.25, "backend.simulator.drain": False})
    reasons = column(run, "reason")
    assert reasons[:3] == ["stop"] * 3
    assert reasons[3] not in ("stop", "length")
    assert len(reasons) == 4


def test_an_slo_that_was_missed_by_the_end_of_a_run_is_missed(ran: Ran) -> None:
    run = ran(
        {
            **{"backend.simulator.horizon_s": 30.0, "backend.simulator.drain": False},
            **{"workload.output_tokens.value": 600, "workload.slo_classes": "[{name: chat, deadline_s: 5}]"},
        }
    )
    assert set(column(run, "reason")) == {"unfinished"}
    assert column(run, "slo_met") == [False] * 10
    assert run.summary.value("overall.slo.overall.num_missed") == 10
    (run.path / "summary.json").unlink()
    assert RunData.load(run.path).summary.value("overall.slo.overall.num_missed") == 10


@pytest.mark.parametrize("time_scale", [0.5, 2.0])
def test_the_rate_asked_for_is_that_of_the_engines_clock(time_scale: float) -> None:
    backend = {"engine": {"model": "/models/m", "time_scale": time_scale}}
    assert asked_rate(config_from_mapping({**BASE, "backend": backend})) == 1.0 / time_scale


def test_forming_a_step_takes_the_time_that_is_said(ran: Ran) -> None:
    run = ran({"backend.simulator.scheduling_overhead_s": 0.02})
    assert column(run, "ttft_s") == pytest.approx([0.12] * 10)
    assert column(run, "e2e_s") == pytest.approx([0.6] * 10)


def test_each_replicaset_may_have_steps_of_its_own(ran: Ran) -> None:
    sets = {"replicasets": "{slow: {select: {max_prompt_tokens: 100}}, rest: {}}"}
    slow = {"backend.simulator.replicasets": "{slow: {latency: {type: constant, step_time_s: 0.15}}}"}
    assert column(ran(sets), "ttft_s") == pytest.approx([0.1] * 10)
    assert column(ran({**sets, **slow}), "ttft_s") == pytest.approx([0.15] * 10)
    with pytest.raises(ConfigError, match="slwo"):
        ran({**sets, "backend.simulator.replicasets": "{slwo: {latency: {type: constant, step_time_s: 1}}}"})


# Replicas


AT_ONCE = {"workload.arrivals": "{type: at_once}"}


def test_so_many_requests_run_at_once(ran: Ran) -> None:
    """Ten at once: all in one batch, in pairs, or one after the other."""
    for size, last in ((10, 0.5), (2, 2.5), (1, 5.0)):
        run = ran({**AT_ONCE, "replica.max_batch_size": size, "replica.memory.num_blocks": 1000})
        assert max(column(run, "e2e_s")) == pytest.approx(last, abs=0.11 * (size == 10))


def test_a_step_has_so_many_tokens(ran: Ran) -> None:
    run = ran({"replica.max_batch_tokens": 40})
    assert column(run, "ttft_s") == pytest.approx([0.3] * 10)
    assert max(run.steps().column("prefill_tokens").to_pylist()) == 40


def test_a_request_has_so_many_tokens(ran: Ran) -> None:
    run = ran({"replica.max_model_len": 103})
    assert Counter(column(run, "reason")) == {"length": 10}
    assert column(run, "num_output_tokens") == [3] * 10
    assert set(column(ran({"replica.max_model_len": 100}), "reason")) == {"rejected"}


def test_replicas_share_what_comes(ran: Ran) -> None:
    run = ran({**AT_ONCE, "num_replicas": 2, "replica.max_batch_size": 1})
    assert Counter(column(run, "replica_id")) == {0: 5, 1: 5}
    assert max(column(run, "e2e_s")) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("bound", "num_taken"), [({"max_queued_requests": 3}, 3), ({"max_queued_tokens": 450}, 4)], ids=str
)
def test_a_bounded_queue_turns_the_rest_away(bound: dict[str, int], num_taken: int, ran: Ran) -> None:
    run = ran({**AT_ONCE, **{f"admission.{name}": value for name, value in bound.items()}})
    assert Counter(column(run, "reason")) == {"stop": num_taken, "rejected": 10 - num_taken}
    assert all("the queue is full" in detail for detail in column(run, "detail") if detail)


def test_blocks_are_the_memory_that_there_is(ran: Ran) -> None:
    """A request holds seven blocks of 16 tokens: with 14 of them two run at once."""
    run = ran({**AT_ONCE, "replica.memory.num_blocks": 14, "replica.memory.watermark_fraction": 0})
    assert max(run.steps().column("num_running").to_pylist()) == 2
    halves = ran({**AT_ONCE, "replica.memory.num_blocks": 7, "replica.memory.block_size": 32})
    assert max(halves.steps().column("num_running").to_pylist()) == 1


# Requests


def test_classes_bring_their_slos_and_their_names(ran: Ran) -> None:
    classes = "[{name: fast, share: 1, ttft_slo_s: 0.05}, {name: slow, share: 1, ttft_slo_s: 0.5}]"
    run = ran({"workload.slo_classes": classes})
    assert set(column(run, "slo_class")) == {"fast", "slow"}
    attained = {
        name: run.summary.value(f"by_slo_class.{name}.slo.overall.attainment_fraction") for name in ("fast", "slow")
    }
    assert attained == {"fast": 0.0, "slow": 1.0}


def test_requests_expire_when_nobody_begins_with_them(ran: Ran) -> None:
    classes = "[{name: hasty, expires_after_s: 0.7}]"
    run = ran({**AT_ONCE, "replica.max_batch_size": 1, "workload.slo_classes": classes})
    assert Counter(column(run, "reason")) == {"stop": 2, "expired": 8}


def test_a_seed_changes_what_is_drawn_and_nothing_else_does(ran: Ran) -> None:
    drawn = {"workload.prompt_tokens": "{type: uniform, min: 1, max: 400}"}
    one, again, other = (column(ran({**drawn, **more}), "num_prompt_tokens") for more in ({}, {}, {"seed": 1}))
    assert one == again != other


def test_a_pool_keeps_the_prefixes_of_its_tenants_apart(ran: Ran) -> None:
    """All prompts are one system prompt and little more, so only the first one of those that share finds nothing cached."""
    workload = (
        "{type: sessions, num_sessions: 10, arrivals: {type: fixed, rate: 1.0}, turns: {type: constant, value: 1}, "
        "first_turn_tokens: {type: constant, value: 4}, turn_tokens: {type: constant, value: 4}, "
        "output_tokens: {type: constant, value: 5}, system_prompts: {tokens: {type: constant, value: 96}}, "
        "tenants: {shares: {a: 1, b: 1}}}"
    )
    for salt, num_first in (("false", 1), ("true", 2)):
        pools = f"{{prefill: {{replica: {{memory: {{tenant_salt: {salt}}}}}}}, decode: {{}}}}"
        cached = column(ran({"workload": workload, "pools": pools}), "num_cached_tokens")
        assert Counter(cached) == {0: num_first, 96: 10 - num_first}


@pytest.mark.parametrize(("steps", "decisions"), [(True, False), (False, True), (False, False)])
def test_outputs_are_left_out_when_they_are_not_wanted(steps: bool, decisions: bool, ran: Ran) -> None:
    run = ran({"output.steps": str(steps).lower(), "output.decision_log": str(decisions).lower()})
    assert (run.path / "decisions.parquet").exists() is decisions
    assert bool(run.steps().num_rows) is steps
    assert column(run, "e2e_s") == pytest.approx([0.5] * 10)
