"""KV connectors under asynchronous scheduling: loads wait for steps in flight, ends are told when the last token is known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.vllm.connector_fuzz import compare
from tests.vllm.core import make_scheduler, vllm_config
from tests.vllm.test_vllm_connector import BLOCK, MODULE, request
from vajra_py.vllm import Scheduler


@pytest.mark.parametrize("kind", ["plain", "adapters", "drafts", "windows", "windows-drafts"])
@pytest.mark.parametrize("seed", range(5_000_001, 5_000_004))
def test_clients_and_connector_see_what_they_see_under_vllms(tiny_model: str, seed: int, kind: str) -> None:
    found, _ = compare(tiny_model, seed, is_async=True, kind=kind)
    assert found is None


def test_sessions_of_this_run_alone(tiny_model: str) -> None:
    """Other seeds each time; a failure names its own."""
    first = random.SystemRandom().randrange(10**9)
    for seed in range(first, first + 2):
        found, _ = compare(tiny_model, seed, is_async=True)
        assert found is None, f"make vllm-fuzz SEED={seed} COUNT=1 RUNS=connector/async: {found}"


class Ahead:
    """A scheduler with a step in flight whenever the next one is formed."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.in_flight: list[Any] = []

    def form(self) -> Any:
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        return output

    def come_back(self, report: KVConnectorOutput | None = None, token: int = 9) -> list[Any]:
        """The oldest step comes back with this token for each of its requests that has computed its prompt."""
        output = self.in_flight.pop(0)
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [[token] for _ in names])
        result.kv_connector_output = report
        told = self.scheduler.update_from_output(output, result)
        return [one for each in told.values() for one in each.outputs]


def ahead(tiny_model: str, num_blocks: int, policy: str = "fail") -> Iterator[Ahead]:
    config = vllm_config(tiny_model, max_model_len=64, max_num_batched_tokens=64, enforce_eager=True)
    config.scheduler_config.async_scheduling = True
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="GroupedConnector",
        kv_role="kv_both",
        kv_connector_module_path=MODULE,
        kv_load_failure_policy=policy,
    )
    made = make_scheduler(Scheduler, config, num_blocks + 1, BLOCK, log_stats=True)
    yield Ahead(made)
    made.shutdown()


@pytest.fixture
def steps(tiny_model: str) -> Iterator[Ahead]:
    yield from ahead(tiny_model, 32)


@pytest.fixture
def few_blocks(tiny_model: str) -> Iterator[Ahead]:
    yield from ahead(tiny_model, 9)


@pytest.fixture
def recomputing(tiny_model: str) -> Iterator[Ahead]:
    yield from ahead(tiny_model, 32, "recompute")


def told_of(scheduler: Any, name: str) -> list[Any]:
    return [one for one in scheduler.connector.calls if one[0] == "finished" and one[1] == name]


def test_an_end_by_length_is_told_with_its_last_token(steps: Ahead) -> None:
    steps.scheduler.add_request(request(num_tokens=8))
    for _ in range(4):
        steps.form()
        if len(steps.in_flight) > 1:
            steps.come_back()
    steps.form()  # the mechanism ends the request, whose last token is in flight
    assert not told_of(steps.scheduler, "r0")
    assert steps.scheduler.get_kv_cache_usage() > 0
    (last,) = steps.come_back()
    assert last.kv_transfer_params == {"blocks": [3], "tokens": [9, 9, 9, 9]}
    ((_, _, status, *_),) = told_of(steps.scheduler, "r0")
    assert status == "FINISHED_LENGTH_CAPPED"
    steps.come_back()
    assert steps.scheduler.get_kv_cache_usage() == 0


def test_blocks_that_a_step_in_flight_writes_are_not_loaded_to(few_blocks: Ahead) -> None:
    scheduler = few_blocks.scheduler
    scheduler.add_request(request("r0", num_tokens=16))
    few_blocks.form()
    few_blocks.come_back()
    few_blocks.form()
    scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request("r1", num_tokens=28, first=200, remote=28, load_turns=1))
    output = few_blocks.form()
    assert not output.kv_connector_metadata.loads
    few_blocks.come_back()
    output = few_blocks.form()
    (load,) = output.kv_connector_metadata.loads
    assert len(load.tables[0]) == 7


@pytest.mark.parametrize("computes", [False, True])
def test_a_load_that_comes_with_the_step_in_which_its_request_is_aborted_holds_no_blocks(
    steps: Ahead, computes: bool
) -> None:
    scheduler = steps.scheduler
    if computes:
        scheduler.add_request(request("r1", num_tokens=8))
        steps.form()
    scheduler.add_request(request("r0", num_tokens=16, remote=16, load_turns=1))
    steps.form()
    steps.form()
    scheduler.finish_requests(["r0"], RequestStatus.FINISHED_ABORTED)
    steps.come_back(KVConnectorOutput(finished_recving={"r0"}))
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        steps.form()
        steps.come_back()
    assert scheduler.get_kv_cache_usage() == 0


def test_a_request_in_a_step_in_flight_is_not_preempted(few_blocks: Ahead) -> None:
    scheduler = few_blocks.scheduler
    for name, first in (("r0", 100), ("r1", 200)):
        scheduler.add_request(request(name, num_tokens=16, first=first))  # four blocks each, and one is left
    few_blocks.form()
    output = few_blocks.form()
    assert list(output.num_scheduled_tokens) == ["r0"]  # it has the last block
    assert not output.preempted_req_ids
    few_blocks.come_back()
    few_blocks.come_back()
    output = few_blocks.form()
    assert output.preempted_req_ids == {"r1"}
    assert list(output.num_scheduled_tokens) == ["r0"]


def bad(output: Any) -> KVConnectorOutput:
    (load,) = output.kv_connector_metadata.loads
    return KVConnectorOutput(invalid_block_ids={load.tables[0][0]})


def test_a_request_whose_load_failed_ends_although_its_next_step_is_in_flight(steps: Ahead) -> None:
    steps.scheduler.add_request(request(remote=12))
    output = steps.form()
    steps.form()
    assert steps.come_back(bad(output)) == []
    steps.form()
    (end,) = steps.come_back()
    assert str(end.finish_reason) == "error"
    assert "could not be loaded" in end.stop_reason
    assert steps.scheduler.mechanism.replica.memory.free_blocks == 32


def test_a_request_whose_load_failed_computes_its_tokens_again(recomputing: Ahead) -> None:
    scheduler = recomputing.scheduler
    scheduler.add_request(request(remote=12))
    output = recomputing.form()
    recomputing.form()
    told = recomputing.come_back(bad(output), token=1)
    for _ in range(10):
        recomputing.form()
        told += recomputing.come_back()
    tokens = [token for one in told for token in one.new_token_ids]
    assert tokens == [9, 9, 9, 9]
    assert not [one for one in told if one.finish_reason is not None and str(one.finish_reason) == "error"]
    assert [one[2] for one in told_of(scheduler, "r0")] == ["FINISHED_LENGTH_CAPPED"]
