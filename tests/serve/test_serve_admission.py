"""An admission policy behind the HTTP server: what a client gets that is shed, degraded or put off."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest

from vajra_py.contract import (
    ACCEPT,
    Accept,
    AdmissionDecision,
    AdmissionSpec,
    Defer,
    PolicyConfig,
    PolicyContext,
    Refuse,
    ReplicasetView,
    RequestView,
)
from vajra_py.plugins import load_registry


class ByClassConfig(PolicyConfig):
    """No parameters."""


class ByClass:
    """Does what the class of service says."""

    def __init__(self, config: ByClassConfig, context: PolicyContext) -> None:
        self._num_asked = 0

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        self._num_asked += 1
        running = sum(one.num_running for one in replicasets[0].replicas)
        if request.slo_class == "shed":
            return Refuse("not now", 12.2)
        if request.slo_class == "shed-sometime":
            return Refuse("not now")
        if request.slo_class == "short":
            return Accept(max_tokens=2, slo_class="batch")
        if request.slo_class == "every-second":
            return Accept(max_tokens=1) if self._num_asked % 2 else ACCEPT
        if request.slo_class == "shed-every-second":
            return ACCEPT if self._num_asked % 2 else Refuse("not now")
        if request.slo_class == "alone":
            return Defer() if running else ACCEPT
        if request.slo_class == "soon":
            return ACCEPT if self._num_asked > 1 else Defer(now + 0.05)
        if request.slo_class == "broken":
            raise ValueError("oh no")
        return ACCEPT


SPEC = AdmissionSpec("by_class", ByClassConfig, ByClass, "Does what the class says.")


@pytest.fixture
def server(puppet_server: Callable[..., Any]) -> Any:
    settings = {"scheduling": {"admission": "by_class"}}
    return puppet_server(settings, retry_after_s=3, registry=load_registry().with_policies([SPEC]))


def post(server: Any, slo_class: str, timeout: float = 60, **body: Any) -> httpx.Response:
    asked = {"model": "puppet", "prompt": [1, 2, 3], "max_tokens": 4, **body}
    headers = {"x-slo-class": slo_class}
    return httpx.post(f"{server.url}/v1/completions", json=asked, headers=headers, timeout=timeout)


def alive(server: Any) -> list[Any]:
    return list(server.service.session.controller.alive())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("slo_class", "wait"), [("shed", "13"), ("shed-sometime", "3")])
def test_who_is_shed_gets_429_and_when_to_come_back(server: Any, slo_class: str, wait: str, stream: bool) -> None:
    answer = post(server, slo_class, stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, wait)
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("shed", "rate_limit_error")
    assert error["message"] == "shed by the admission policy by_class: not now"


@pytest.mark.parametrize("stream", [False, True])
def test_a_degraded_answer_says_so_in_a_header(server: Any, stream: bool) -> None:
    answer = post(server, "short", stream=stream, n=2)
    assert answer.status_code == 200
    assert answer.headers["x-vajra-degraded"] == "max_tokens=2, slo_class=batch"
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert {one["finish_reason"] for one in answer.json()["choices"]} == {"length"}


def test_outputs_that_were_degraded_differently_are_told_apart(server: Any) -> None:
    answer = post(server, "every-second", n=3)
    assert answer.headers["x-vajra-degraded"] == "0: max_tokens=1; 2: max_tokens=1"
    assert answer.json()["usage"]["completion_tokens"] == 1 + 4 + 1


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_shed_in_part_gets_429_at_once_and_the_rest_is_not_computed(
    server: Any, until: Callable[..., None], stream: bool
) -> None:
    server.strings.hold()
    assert post(server, "shed-every-second", 20, n=2, max_tokens=200, stream=stream).status_code == 429
    server.strings.let_go()
    until(lambda: not alive(server), "the other output is aborted")
    assert server.strings.num_steps < 100


def test_what_is_let_in_as_it_asked_has_no_such_header(server: Any) -> None:
    answer = post(server, "plain")
    assert answer.status_code == 200
    assert "x-vajra-degraded" not in answer.headers


def test_a_deferred_request_just_waits(server: Any, until: Callable[..., None]) -> None:
    assert post(server, "soon").status_code == 200
    server.strings.hold()
    results: list[httpx.Response] = []
    threads = []
    for slo_class in ("plain", "alone"):
        thread = threading.Thread(target=lambda slo_class=slo_class: results.append(post(server, slo_class)))
        thread.start()
        threads.append(thread)
        if slo_class == "plain":
            until(lambda: [one.is_resident for one in alive(server)] == [True], "the first one runs")
    until(lambda: [one.state.value for one in alive(server)] == ["running", "deferred"], "the second one is deferred")
    server.strings.let_go()
    for thread in threads:
        thread.join(60)
    assert [one.status_code for one in results] == [200, 200]


def test_a_client_that_leaves_takes_its_deferred_request_along(server: Any, until: Callable[..., None]) -> None:
    server.strings.hold()
    thread = threading.Thread(target=lambda: post(server, "plain"))
    thread.start()
    until(lambda: [one.is_resident for one in alive(server)] == [True], "the first one runs")
    with pytest.raises(httpx.ReadTimeout):
        post(server, "alone", timeout=0.5)
    until(lambda: len(alive(server)) == 1, "the deferred request is gone")
    server.strings.let_go()
    thread.join(60)


def test_a_policy_that_breaks_the_contract_is_503_for_everybody(server: Any) -> None:
    assert post(server, "plain").status_code == 200
    broken = post(server, "broken")
    answers = [broken]
    with suppress(httpx.ConnectError):  # the server exits, since no replicaset is left
        answers.append(post(server, "plain"))
    for answer in answers:
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "3"
    assert "by_class" in broken.json()["error"]["message"]
    assert "oh no" in json.dumps(broken.json())


def test_the_metrics_count_what_was_decided(server: Any, until: Callable[..., None]) -> None:
    for slo_class in ("plain", "short", "shed", "shed", "soon"):
        post(server, slo_class)
    server.strings.hold()
    threads = [threading.Thread(target=lambda kind=kind: post(server, kind)) for kind in ("plain", "alone")]
    threads[0].start()
    until(lambda: [one.is_resident for one in alive(server)] == [True], "the first one runs")
    threads[1].start()
    until(lambda: len(alive(server)) == 2, "the second one is deferred")
    text = httpx.get(f"{server.url}/metrics").text
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    labels = 'model_name="puppet",replicaset="default"'
    for decision, count in (("degraded", 1.0), ("refused", 2.0), ("deferred", 1.0)):
        key = f'vajra:admission_decisions_total{{decision="{decision}",{labels}}}'
        assert found[key] == count
    assert found[f"vajra:num_requests_deferred{{{labels}}}"] == 1.0
    assert sum(value for name, value in found.items() if name.startswith("vajra:num_requests_waiting")) == 0.0
    server.strings.let_go()
    for thread in threads:
        thread.join(60)
