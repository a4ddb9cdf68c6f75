"""What happens to a run when a policy breaks the contract: the error names it, and the tables so far are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec import structs

from vajra_py.api import load
from vajra_py.config import ExperimentConfig
from vajra_py.contract import Layer, PolicyConfig, PolicySpec
from vajra_py.contract.observer import Observer
from vajra_py.errors import PolicyError
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.plugins import Registry, load_registry
from vajra_py.plugins.registry import PluginSource
from vajra_py.testing.reference_policies import ByArrival, InTurn, PlainChunks, Shared

PRIORITIZER, CHOOSER, SCHEDULER = Layer.REQUEST_PRIORITIZER, Layer.REPLICASET_SCHEDULER, Layer.REPLICA_SCHEDULER
BROKEN = "broken"


class NoParameters(PolicyConfig):
    """Nothing."""


def registry_with(layer: Layer, build: Callable[[], Any]) -> Registry:
    """The installed policies and one more, as if a package had brought it."""
    spec = PolicySpec(BROKEN, layer, NoParameters, lambda config, context: build(), "Breaks at its tenth request.")
    installed = load_registry()
    source = PluginSource("broken-policies", "1.0", "broken")
    return structs.replace(installed, policy_claims=[*installed.policy_claims, (source, spec)])


def settings(folder: Path) -> dict[str, Any]:
    """Twenty requests, one every 100 ms, that are each served at once."""
    return {
        "version": 1,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": "fixed_chunk",
        },
        "replica": {"memory": {"num_blocks": 50}, "max_model_len": 500},
        "workload": {
            "type": "synthetic",
            "num_requests": 20,
            "arrivals": {"type": "fixed", "rate": 10},
            "prompt_tokens": {"type": "constant", "value": 30},
            "output_tokens": {"type": "constant", "value": 3},
        },
        "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
        "output": {"dir": str(folder)},
        "policy_timeout_s": 0.3,
    }


def broken(folder: Path, layer: Layer) -> ExperimentConfig:
    """The same with the broken policy in one layer."""
    config = load(settings(folder))
    assert config.scheduling is not None
    choice = config.scheduling.choice(layer).model_copy(update={"policy": BROKEN, "params": {}})
    return config.model_copy(update={"scheduling": config.scheduling.model_copy(update={layer.value: choice})})


# Policies that keep the contract for nine requests


class RaisesInKey(ByArrival):
    def key(self, request: Any, now: float) -> float:
        return dict.fromkeys(range(9), 1.0)[request.index]


class NotANumber(ByArrival):
    def key(self, request: Any, now: float) -> float:
        return float("nan") if request.index == 9 else 0.0


class ForgetsWhoLeft(ByArrival):
    def on_departures(self, requests: Any, now: float) -> None:
        for request in requests:
            if request.index == 8:
                raise LookupError(f"who is {request.request_id}?")


class AssignsToNobody(InTurn):
    def assign(self, request: Any, replicas: Any, now: float) -> int:
        return 7 if request.index == 9 else 0


class RaisesInPull(Shared):
    def pull(self, replica: Any, queued: Any, now: float) -> Any:
        for request in queued:
            if request.index == 9:
                raise OverflowError("too many")
            yield request.request_id


class WithholdsOne(Shared):
    def pull(self, replica: Any, queued: Any, now: float) -> Any:
        return (request.request_id for request in queued if request.index != 9)


class RaisesInSchedule(PlainChunks):
    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        if any(request.index == 9 for request in replica.waiting()):
            raise ZeroDivisionError("shares")
        super().schedule(replica, batch, now)


class AsksForTooMuch(PlainChunks):
    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        for request in replica.waiting():
            if request.index == 9:
                batch.add(request, 31)
        super().schedule(replica, batch, now)


class PassesRubbish(PlainChunks):
    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        if any(request.index == 9 for request in replica.waiting()):
            batch.add("r9", 1)
        super().schedule(replica, batch, now)


class StopsScheduling(PlainChunks):
    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        if all(request.index != 9 for request in replica.waiting()):
            super().schedule(replica, batch, now)


class NeverReturns(PlainChunks):
    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        while any(request.index == 9 for request in replica.waiting()):
            batch.add_decodes()
        super().schedule(replica, batch, now)


class PreemptsForEver(PlainChunks):
    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        if replica.num_waiting and next(replica.waiting()).index == 9:
            request = next(replica.waiting())
            batch.add(request, 1)
            batch.preempt(request)
        else:
            super().schedule(replica, batch, now)


NINE_SERVED = 27
"""Steps of the nine requests before."""


@pytest.mark.parametrize(
    ("layer", "policy", "names_request", "step", "message"),
    [
        (PRIORITIZER, RaisesInKey, True, None, "key() raised KeyError: 9"),
        (PRIORITIZER, NotANumber, True, None, "key() is not finite numbers (got nan)"),
        (PRIORITIZER, ForgetsWhoLeft, True, None, "LookupError: who is "),
        (CHOOSER, AssignsToNobody, True, None, "assigned a request to replica 7. Replicas that are up: [0]"),
        (CHOOSER, RaisesInPull, False, NINE_SERVED, "OverflowError: too many"),
        (
            CHOOSER,
            WithholdsOne,
            True,
            None,
            "offers no replica anything of the shared queue although one request remains",
        ),
        (SCHEDULER, RaisesInSchedule, False, NINE_SERVED, "ZeroDivisionError: shares"),
        (SCHEDULER, AsksForTooMuch, True, NINE_SERVED, "cannot add 31 tokens. Its next chunk may have at most 30"),
        (SCHEDULER, PassesRubbish, False, NINE_SERVED, "AttributeError"),
        (SCHEDULER, StopsScheduling, True, NINE_SERVED, "scheduled nothing although"),
        (SCHEDULER, NeverReturns, False, NINE_SERVED, "did not return within 0.3 s"),
        (SCHEDULER, PreemptsForEver, False, NINE_SERVED, "preempts in every step and never runs a request"),
    ],
)
def test_the_error_names_the_policy_and_the_tables_are_kept(
    tmp_path: Path, layer: Layer, policy: type[Any], names_request: bool, step: int | None, message: str
) -> None:
    config = broken(tmp_path, layer)
    with pytest.raises(PolicyError) as caught:
        run_experiment(config, registry=registry_with(layer, policy))
    error = caught.value
    assert error.policy == BROKEN
    assert (error.request_id is not None) == names_request
    assert error.step == step
    assert message in str(error)
    assert error.exit_code == 3

    folder = tmp_path / "experiment"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert manifest["error"] == str(error)
    requests = pq.read_table(folder / "requests.parquet").to_pydict()
    served = [reason for reason in requests["reason"] if reason == "stop"]
    assert len(served) in (8, 9) or (policy is WithholdsOne and len(served) == 19)
    assert manifest["num_ended"]["stop"] == len(served)
    assert manifest["num_unfinished"] == len(requests["reason"]) - len(served)
    assert pq.read_table(folder / "steps.parquet").num_rows >= 3 * len(served)
    assert (folder / "summary.json").exists()
    assert (folder / "decisions.parquet").exists()


def test_a_failed_run_is_no_result(tmp_path: Path) -> None:
    """The next attempt with the same settings starts anew."""
    config = broken(tmp_path, SCHEDULER)
    with pytest.raises(PolicyError):
        run_experiment(config, registry=registry_with(SCHEDULER, RaisesInSchedule))
    run = run_experiment(config, registry=registry_with(SCHEDULER, PlainChunks))
    assert run.requests().num_rows == 20
    assert json.loads((tmp_path / "experiment" / "manifest.json").read_text())["status"] == "finished"


def test_a_failing_observer_leaves_tables_too(
    tmp_path: Path, with_observer: Callable[[str, Observer], Registry]
) -> None:
    class Clumsy(Observer):
        def on_ended(self, request: Any, reason: Any, detail: str, now: float) -> None:
            if request.index == 5:
                raise OSError("disk full")

    config = load(settings(tmp_path))
    choice = type(config.backend.settings.latency)(type="clumsy")
    config = config.model_copy(update={"observers": (choice,)})
    with pytest.raises(OSError, match="disk full"):
        run_experiment(config, registry=with_observer("clumsy", Clumsy()))
    manifest = json.loads((tmp_path / "experiment" / "manifest.json").read_text())
    assert (manifest["status"], manifest["error"]) == ("failed", "OSError: disk full")
    assert pq.read_table(tmp_path / "experiment" / "requests.parquet").num_rows >= 5


# Settings of experiments that the simulator obeys


def test_requests_that_never_fit_are_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    given = settings(tmp_path)
    given["workload"] |= {"num_requests": 30, "prompt_tokens": {"type": "uniform", "min": 100, "max": 900}}
    table = run_experiment(load(given)).requests().to_pydict()
    for prompt, reason, detail in zip(table["num_prompt_tokens"], table["reason"], table["detail"], strict=True):
        assert (reason == "rejected") == (prompt >= 500)
        assert ("may hold at most 500 tokens here" in detail) == (reason == "rejected")
    assert 0 < table["reason"].count("rejected") < 30


def test_replicasets_serve_whom_their_selectors_name(tmp_path: Path) -> None:
    given = settings(tmp_path)
    given["replicasets"] = {
        "long": {"select": {"min_prompt_tokens": 200}, "num_replicas": 2},
        "people": {"select": {"tenants": ["people"]}},
        "rest": {"scheduling": {**given["scheduling"], "replicaset_scheduler": "pull"}},
    }
    given["workload"] |= {
        "num_requests": 60,
        "prompt_tokens": {"type": "uniform", "min": 10, "max": 400},
        "tenants": {"shares": {"people": 1, "jobs": 1}},
    }
    table = run_experiment(load(given)).requests().to_pydict()
    rows = zip(table["replicaset"], table["num_prompt_tokens"], table["tenant"], table["replica_id"], strict=True)
    replicas: dict[str, set[int]] = {}
    for replicaset, prompt, tenant, replica_id in rows:
        assert replicaset == ("long" if prompt >= 200 else "people" if tenant == "people" else "rest")
        replicas.setdefault(replicaset, set()).add(replica_id)
    assert replicas == {"long": {0, 1}, "people": {0}, "rest": {0}}


def test_warm_up_requests_are_served_and_not_counted(tmp_path: Path) -> None:
    whole = run_experiment(load(settings(tmp_path / "whole")))
    given = settings(tmp_path / "warm")
    given["backend"]["simulator"]["warmup_s"] = 0.95
    warm = run_experiment(load(given))
    assert warm.requests().num_rows == 20
    tables = [(run.path / "requests.parquet").read_bytes() for run in (whole, warm)]
    assert tables[0] == tables[1], "all are served, at the same times"
    counted = [summarised(run.path) for run in (whole, warm)]
    assert counted == [20, 10]


def summarised(folder: Path) -> int:
    """How many requests the summary speaks of."""
    summary = json.loads((folder / "summary.json").read_text())
    return int(summary["overall"]["counts"]["arrived"])


def test_equal_settings_give_equal_bytes(tmp_path: Path) -> None:
    given = settings(tmp_path)
    given["workload"]["arrivals"] = {"type": "poisson", "rate": 60}
    given["scheduling"] |= {"request_prioritizer": "lrs", "replicaset_scheduler": "power_of_two"}
    given["num_replicas"] = 3
    contents = []
    for name in ("one", "other"):
        run = run_experiment(load(given), folder=tmp_path / name)
        files = sorted(path for path in run.path.iterdir() if path.name != "environment.json")
        contents.append({path.name: path.read_bytes() for path in files})
    assert contents[0].keys() == contents[1].keys()
    differing = [name for name in contents[0] if contents[0][name] != contents[1][name]]
    assert not differing
