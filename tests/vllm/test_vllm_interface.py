"""What vLLM asks of a scheduler besides steps: refusals, errors, resets, counts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.vllm.core import Core, Wish, make_scheduler, vllm_config
from vajra_py.errors import ConfigError
from vajra_py.vllm import Scheduler
from vajra_py.vllm.settings import EXPERIMENT_VARIABLE, wishes_of
from vajra_py.vllm.support import check_version


def wish(index: int, prompt: int = 40, output: int = 12, arrives: int = 0, **given: Any) -> Wish:
    rng = random.Random(index)
    tokens = tuple(rng.randrange(500) for _ in range(prompt))
    return Wish(f"r-{index}", tokens, output, arrives, **given)


def core_of(model: str, num_blocks: int = 101, **options: Any) -> Core:
    config = vllm_config(model, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=16, **options)
    return Core(make_scheduler(Scheduler, config, num_blocks, 4))


def test_after_a_reset_of_the_cache_everything_is_computed_again(tiny_model: str) -> None:
    core = core_of(tiny_model)
    for index in range(4):
        core.add(wish(index), 4, True)
    for _ in range(6):
        core.step()
    assert not core.scheduler.reset_prefix_cache()
    assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
    while core.scheduler.has_requests():
        core.step()
    assert set(core.reasons.values()) == {"length"}
    assert [len(tokens) for tokens in core.tokens.values()] == [12] * 4
    assert core.steps[6].computed == dict.fromkeys(core.steps[6].scheduled, 0)
    assert core.scheduler.get_kv_cache_usage() == 0.0


def test_a_pause_forms_no_steps(tiny_model: str) -> None:
    from vllm.v1.core.sched.interface import PauseState

    core = core_of(tiny_model)
    core.add(wish(0), 4, True)
    core.step()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not core.scheduler.has_unfinished_requests()
    assert core.scheduler.schedule().total_num_scheduled_tokens == 0
    core.scheduler.update_from_output(core.steps and _nothing(), _empty())
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    while core.scheduler.has_requests():
        core.step()
    assert core.reasons == {"r-0": "length"}


def _nothing() -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    return SchedulerOutput.make_empty()


def _empty() -> Any:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    return EMPTY_MODEL_RUNNER_OUTPUT


def test_a_request_that_never_fits_is_told_so(tiny_model: str) -> None:
    core = core_of(tiny_model, num_blocks=21)
    core.add(wish(0, prompt=60, output=100), 4, True)
    core.add(wish(1, prompt=20, output=10), 4, True)
    while core.scheduler.has_requests():
        core.step()
    assert core.reasons == {"r-0": "abort", "r-1": "length"}


@pytest.mark.parametrize(
    ("options", "word"),
    [({"data_parallel_size": 2}, "data-parallel"), ({"pipeline_parallel_size": 2}, "pipeline-parallel")],
)
def test_what_cannot_be_scheduled_is_refused_with_the_reason(
    tiny_model: str, options: dict[str, int], word: str
) -> None:
    config = vllm_config(tiny_model, max_model_len=256)
    for name, value in options.items():
        setattr(config.parallel_config, name, value)
    with pytest.raises(ConfigError, match=word) as caught:
        make_scheduler(Scheduler, config, 20, 4)
    assert "vLLM's own scheduler" in str(caught.value)


def test_other_versions_are_refused_in_one_line() -> None:
    assert check_version("0.32.0") == (0, 32)
    assert check_version("0.33.1.dev3+cpu") == (0, 33)
    with pytest.raises(ConfigError) as caught:
        check_version("0.31.2")
    assert str(caught.value).count("\n") == 0


def test_the_experiment_is_named_by_option_or_environment() -> None:
    assert wishes_of({"vajra": {"experiment": "a.yaml"}}, {EXPERIMENT_VARIABLE: "b.yaml"}).experiment is not None
    assert str(wishes_of({}, {EXPERIMENT_VARIABLE: "b.yaml"}).experiment) == "b.yaml"
    assert wishes_of({}, {}).experiment is None
    with pytest.raises(ConfigError, match="experiment"):
        wishes_of({"vajra": {"experimnt": "a.yaml"}}, {})
