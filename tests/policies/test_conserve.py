"""ConServe: budgets that meet online SLOs, and checkpoints that bound what a preemption costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vajra_policies.slo.conserve import SPEC
from vajra_py.contract.observer import Observer, StepRecord
from vajra_py.latency import AffineModel
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.testing.simulated import serve, simulated_system
from vajra_py.workload import RequestSpec

TRIED = replace(SPEC, name="tried")
BLOCK = 16


def test_offline_work_fills_what_the_tightest_slo_leaves() -> None:
    options = HarnessOptions(num_blocks=400, latency=AffineModel(0.01, 0.0001))
    harness = Harness("priority", "round_robin", ("conserve", {"offline_step_s": 0.06004}), options)
    harness.submit("offline", 2000, 50, priority=1)
    alone = harness.step()
    assert alone is not None
    assert alone.tokens == {"offline": 500}, "10 ms and 500 tokens are 60 ms"
    harness.submit("chat", 100, 20, tpot_slo_s=0.03004)
    harness.step()
    beside = harness.step()
    assert beside is not None
    assert beside.tokens == {"chat": 1, "offline": 199}, "30 ms"
    harness.submit("other", 100, 20, tpot_slo_s=0.02004)
    harness.step()
    tighter = harness.step()
    assert tighter is not None
    assert tighter.tokens == {"chat": 1, "other": 1, "offline": 98}


class Resumed(Observer):
    """Tokens that a preempted request had, and those that it found again."""

    wants_steps = True

    def __init__(self) -> None:
        self.before: dict[str, int] = {}
        self.lost: list[int] = []
        self._computed: dict[str, int] = {}

    def on_step_begin(self, step: StepRecord) -> None:
        for request, _ in step.preempted:
            self.before[request.request_id] = self._computed[request.request_id]
        for chunk in step.chunks:
            name = chunk.request.request_id
            if name in self.before:
                self.lost.append(self.before.pop(name) - chunk.num_computed_before)
            self._computed[name] = chunk.num_computed_before + chunk.num_tokens


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_with_checkpoints_a_preemption_costs_a_block_at_most(has_checkpoints: bool) -> None:
    tiers = [{"name": "host", "num_blocks": 500, "bandwidth_gb_s": 100.0, "write": "write_through"}]
    memory = {"num_blocks": 24, "watermark_fraction": 0.0, "prefix_cache": {}}
    if has_checkpoints:
        memory["tiers"] = {"kv_bytes_per_token": 1000, "levels": tiers}
    scheduling = {"request_prioritizer": "priority", "replica_scheduler": TRIED.name}
    settings = {"replica": {"max_batch_size": 4, "max_model_len": 400, "memory": memory}}
    controller, simulator = simulated_system(TRIED, scheduling, settings)
    watch = Resumed()
    controller.watch([watch])
    specs = [RequestSpec(f"batch{index}", 0.0, 100, 60, priority=1) for index in range(2)]
    specs += [RequestSpec(f"chat{index}", 0.5 + 1.5 * index, 250, 20) for index in range(3)]
    serve(controller, simulator, specs)
    assert len(watch.lost) >= 2
    if has_checkpoints:
        assert max(watch.lost) <= BLOCK
    else:
        assert max(watch.lost) > 4 * BLOCK, "the chats have overwritten it"
