"""What the user reads when something is wrong, and what the shell gets as exit code."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py import errors
from vajra_py.errors import (
    ConfigError,
    ExecutorError,
    PluginError,
    PolicyError,
    Problem,
    RunError,
    RunInterrupted,
    UnknownNameError,
    VajraError,
    WorkloadError,
    did_you_mean,
)

SAMPLES: list[VajraError] = [
    VajraError("something"),
    ConfigError(
        [Problem("a.yaml:3 seed", "not a whole number ('x')", "Allowed: 0 and up"), Problem("a.yaml", "no version")]
    ),
    WorkloadError("trace.csv", 7, "negative length (-3)", "Lengths are 1 and up"),
    PluginError("acme 1.2", "fails to import"),
    UnknownNameError("replica scheduler", "fixd_chunk", ["fixed_chunk", "space_sharing"]),
    PolicyError("lrs", "key is not finite (nan)", request_id=12, step=40),
    ExecutorError("worker 3 died"),
    RunError("runs/a: exists"),
    RunInterrupted("stopped after 12 of 40"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_back_from_a_worker_process(error: VajraError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_stands_in_the_tree_with_its_exit_code() -> None:
    offered = {getattr(errors, name) for name in errors.__all__}
    kinds = {one for one in offered if isinstance(one, type) and issubclass(one, Exception)}
    assert {type(error) for error in SAMPLES} == kinds
    drawn = dict(re.findall(r"(\w+(?:Error|Interrupted)) \[(\d+)\]", errors.__doc__ or ""))
    assert drawn == {type(error).__name__: str(error.exit_code) for error in SAMPLES}


def test_a_config_error_prints_all_problems_one_line_each() -> None:
    error = SAMPLES[1]
    assert str(error).splitlines() == [
        "a.yaml:3 seed: not a whole number ('x'). Allowed: 0 and up.",
        "a.yaml: no version.",
    ]


def test_a_config_error_without_a_problem_is_a_bug() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        ConfigError([])


def test_a_workload_error_says_file_and_line() -> None:
    assert str(SAMPLES[2]) == "trace.csv:7: negative length (-3). Lengths are 1 and up."
    assert str(WorkloadError("trace.csv", None, "empty file")) == "trace.csv: empty file."
    with pytest.raises(ConfigError):
        raise SAMPLES[2]


def test_a_policy_error_names_policy_request_and_step() -> None:
    assert str(SAMPLES[5]) == "policy lrs, request 12, step 40: key is not finite (nan)"
    assert str(PolicyError("pull", "returned None")) == "policy pull: returned None"
    assert "request 0" in str(PolicyError("pull", "unknown request", request_id=0))


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    assert str(SAMPLES[4]) == (
        "replica scheduler: no installed package offers that name ('fixd_chunk'). "
        "Did you mean 'fixed_chunk'? Allowed: fixed_chunk, space_sharing."
    )


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("fcsf", "fcfs"),
        ("FCFS", "fcfs"),
        ("round-robin", "round_robin"),
        ("power_of_2_choices", "power_of_two_choices"),
    ],
)
def test_did_you_mean_finds_slips_of_the_finger(name: str, nearest: str) -> None:
    choices = ["power_of_two_choices", "round_robin", "fcfs", "edf"]
    assert did_you_mean(name, choices) == (
        f"Did you mean {nearest!r}? Allowed: edf, fcfs, power_of_two_choices, round_robin"
    )


def test_did_you_mean_guesses_nothing_from_afar() -> None:
    assert did_you_mean("zzz", ["fcfs", "edf"]) == "Allowed: edf, fcfs"
    assert did_you_mean("fcfs", []) == "There are none to choose from"


@given(where=st.text(min_size=1), message=st.text(), allowed=st.none() | st.text())
def test_a_problem_is_always_one_line(where: str, message: str, allowed: str | None) -> None:
    assert len(str(Problem(where, message, allowed)).splitlines()) <= 1


@given(
    name=st.text(max_size=20),
    choices=st.lists(st.text(alphabet="abcdef_", min_size=1, max_size=8), max_size=6, unique=True),
)
def test_did_you_mean_never_offers_what_does_not_exist(name: str, choices: list[str]) -> None:
    guess = re.match(r"Did you mean '([^']*)'\?", did_you_mean(name, choices))
    if guess is not None:
        assert guess.group(1) in choices
