"""Are mistakes in what a plug-in author passes to the suites and the harness named?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vajra_py.contract import Layer, PolicyConfig, PolicySpec
from vajra_py.errors import ConfigError, PluginError
from vajra_py.testing import (
    Harness,
    PlainChunks,
    check_admission_policy,
    check_policy,
    check_retention,
    check_routing_part,
    check_scaler,
)


class Size(PolicyConfig):
    """A number."""

    size: int = 16


class Chunks(PlainChunks):
    """A policy that keeps its parameter."""

    def __init__(self, size: int) -> None:
        self.size = size


SPEC = PolicySpec("chunks", Layer.REPLICA_SCHEDULER, Size, lambda config, _: Chunks(config.size), "Chunks.")
UNKNOWN = r"params\.siez: unknown key\. Did you mean 'size'\? Allowed: size"


def test_the_suite_explains_a_wrong_parameter_as_an_experiment_does() -> None:
    with pytest.raises(AssertionError, match=rf"cannot be built from {{'siez': 3}}: {UNKNOWN}"):
        check_policy(SPEC, {"siez": 3})


@pytest.mark.parametrize(
    "check", [check_policy, check_admission_policy, check_scaler, check_retention, check_routing_part]
)
@pytest.mark.parametrize("wrong", [PlainChunks, "fixed_chunk"])
def test_the_suites_take_specs_only(check: Callable[..., None], wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"policy under test: must be a \w+Spec \(got .*Pass the spec"):
        check(wrong)


def test_the_harness_takes_specs_with_their_parameters() -> None:
    assert Harness("fcfs", "pull", SPEC).replica_schedulers[0].size == 16
    assert Harness("fcfs", "pull", (SPEC, {"size": 3})).replica_schedulers[0].size == 3
    with pytest.raises(ConfigError, match=UNKNOWN):
        Harness("fcfs", "pull", (SPEC, {"siez": 3}))
    with pytest.raises(PluginError, match="request_prioritizer"):
        Harness(SPEC, "pull", SPEC)


def test_the_harness_says_what_it_takes() -> None:
    wrong: Any = Chunks(3)
    with pytest.raises(ConfigError, match=r"request_prioritizer: must be a policy .*an object with a method key"):
        Harness(wrong, "pull", "fixed_chunk")


@pytest.mark.parametrize("tokens", [(0, 1), (5, 0), ("5", 1)])
def test_a_request_without_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match=r"request 'z': num_.* must be a whole number of at least 1"):
        Harness("fcfs", "pull", "fixed_chunk").submit("z", *tokens)
