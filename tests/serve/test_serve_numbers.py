"""Do the numbers that a server shows agree with what it did?"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from vajra_py.serve.observe.stats import Histogram


def samples(server: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = httpx.get(f"{server.url}/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


SET = ("replicaset", "default")


def traffic(server: Any) -> None:
    for number in range(4):
        body = {
            "user": f"tenant-{number % 2}",
            "slo_class": "chat",
            "ttft_slo_ms": 1e-3 if number == 3 else 1e9,
            "tbt_slo_ms": 1e-3 if number > 1 else 1e9,
        }
        assert server.post(prompt=[5] * 40, max_tokens=6, **body).status_code == 200
    assert server.post(prompt=[1], temperature=-1).status_code == 400


@pytest.mark.parametrize("prefix", ["vajra", "vllm"])
def test_metrics_count_what_happened(puppet_server: Callable[..., Any], prefix: str) -> None:
    server = puppet_server(metric_names=prefix)
    traffic(server)
    found = samples(server)
    assert found[f"{prefix}:prompt_tokens_total", (SET,)] == 160
    assert found[f"{prefix}:generation_tokens_total", (SET,)] == 24
    assert found[f"{prefix}:prefix_cache_queries_total", (SET,)] == 160
    assert found[f"{prefix}:prefix_cache_hits_total", (SET,)] == 3 * 32
    assert found[f"{prefix}:time_to_first_token_seconds_count", (SET,)] == 4
    assert found[f"{prefix}:inter_token_latency_seconds_count", (SET,)] == 20
    assert found[f"{prefix}:e2e_request_latency_seconds_count", (SET,)] == 4
    assert found[f"{prefix}:num_requests_running", (("replica", "0"), SET)] == 0
    assert found[f"{prefix}:kv_cache_usage_perc", (("replica", "0"), SET)] == 0
    assert found[f"{prefix}:request_success_total", (("finished_reason", "length"), SET)] == 4
    assert found["vajra:step_time_seconds_count", (SET,)] == server.strings.num_steps
    assert found["vajra:slo_violations_total", (SET, ("slo", "ttft"), ("slo_class", "chat"))] == 1
    assert found["vajra:slo_violations_total", (SET, ("slo", "tbt"), ("slo_class", "chat"))] == 2
    assert found["vajra:tenant_total_service_jain_index", ()] > 0.9
    assert found["vajra:replicas_up", ()] == 1
    decisions = ("layer", "replica_scheduler"), ("policy", "vllm_v1"), SET
    assert found["vajra:policy_decision_seconds_count", decisions] >= server.strings.num_steps


def test_tokens_are_counted_as_they_come(puppet_server: Callable[..., Any], until: Callable[..., None]) -> None:
    server = puppet_server()
    server.strings.hold()
    answer: list[Any] = []
    thread = threading.Thread(target=lambda: answer.append(server.post(prompt=[5] * 40, max_tokens=6)))
    thread.start()
    server.strings.step(3)
    until(lambda: samples(server)["vajra:generation_tokens_total", (SET,)] == 3, "three tokens are counted")
    found = samples(server)
    assert found["vajra:prompt_tokens_total", (SET,)] == 40
    assert found["vllm:request_generation_tokens_count", (SET,)] == 0
    server.strings.let_go()
    thread.join(60)
    assert answer[0].status_code == 200
    assert samples(server)["vajra:generation_tokens_total", (SET,)] == 6


def test_dashboards_made_for_vllm_find_their_names(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    traffic(server)
    found = samples(server)
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
        "time_to_first_token_seconds_bucket", "time_per_output_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum", "request_inference_time_seconds_sum", "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket", "prompt_tokens_total", "generation_tokens_total", "request_success_total",
        "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "iteration_tokens_total_bucket",
        "request_time_per_output_token_seconds_count",
    ):  # fmt: skip
        assert any(one == f"vllm:{name}" for one, _ in found), name
    for (name, labels), value in found.items():
        if name.startswith("vllm:") and name.removeprefix("vllm:") in {one.removeprefix("vajra:") for one, _ in found}:
            assert found.get(("vajra:" + name.removeprefix("vllm:"), labels)) == value, name


def test_every_number_has_its_name(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(engine={"latency": {"type": "constant", "step_time_s": 0.25}})
    traffic(server)
    found = samples(server)
    steps = server.strings.num_steps
    assert found["vajra:step_predicted_seconds_total", (SET,)] == pytest.approx(0.25 * steps)
    assert 0 < found["vajra:step_measured_seconds_total", (SET,)] < 60
    assert found["vajra:step_forming_seconds_count", (SET,)] >= steps  # a step may be formed in vain
    assert found["vajra:step_time_seconds_count", (SET,)] == steps
    assert found["vajra:tenant_total_service_jain_index", ()] == pytest.approx(1.0)
    layers = {dict(labels).get("layer") for name, labels in found if name == "vajra:policy_decision_seconds_count"}
    assert layers == {"replicaset_scheduler", "replica_scheduler"}
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    said = set(re.findall(r"`(?:vajra:)?([a-z0-9_]+)`", page[page.index("## Numbers") :]))
    shown = {name.partition(":")[2] for name, _ in found}
    shown = {name for name in shown if not name.endswith(("_bucket", "_sum", "_created"))}
    missing = {name for name in shown if name not in said and name.removesuffix("_count") not in said}
    assert not missing, f"docs/serving.md does not name {sorted(missing)}"


def test_tenants_do_not_make_labels_without_end(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(max_labels=3)
    for number in range(8):
        assert server.post(max_tokens=1, user=f"tenant-{number}").status_code == 200
    tenants = {
        dict(labels).get("tenant") for name, labels in samples(server) if name.startswith("vajra:tenant_service")
    }
    assert tenants == {"tenant-0", "tenant-1", "tenant-2", "other"}


def test_the_dashboard_is_one_page_that_loads_nothing_from_elsewhere(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    traffic(server)
    page = httpx.get(f"{server.url}/dashboard")
    assert page.headers["content-type"].startswith("text/html")
    assert "src=" not in page.text
    assert "<link" not in page.text
    assert page.text.count("http") == page.text.count("http://www.w3.org/2000/svg")
    data = httpx.get(f"{server.url}/dashboard/data").json()
    assert data["status"] == "ready"
    assert data["classes"]["chat"]["requests"] == 4
    assert data["classes"]["chat"]["ttft_p50_ms"] > 0
    (one,) = data["replicasets"]
    assert one["ended"] == {"length": 4}
    assert one["policies"]["replica_scheduler"] == "vllm_v1"
    assert one["replicas"][0] == {
        "replica": 0,
        "up": True,
        "running": 0,
        "waiting": 0,
        "max_batch_size": 4,
        "num_blocks": 64,
        "kv_used": 0.0,
        "batch": {"decodes": 0, "prefills": 0, "prefill_tokens": 0},
    }


@given(st.lists(st.floats(0, 1e4), max_size=60), st.lists(st.floats(0, 1e4), max_size=60))
def test_histograms_count_every_value_once(one_by_one: list[float], together: list[float]) -> None:
    histogram = Histogram((1.0, 10.0, 100.0))
    for value in one_by_one:
        histogram.add(value)
    histogram.add_all(np.asarray(together, dtype=float))
    values = one_by_one + together
    for bound, count in histogram.cumulative():
        assert count == sum(value <= float(bound) for value in values)
    assert histogram.total == pytest.approx(sum(values))
