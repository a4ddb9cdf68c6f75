"""Does one server serve several models, each with its own weights and policies, and never mix them up?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vajra_py.config import system_from_mapping
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.serve.session.catalogue import Catalogue

FILE = """
version: 1
preset: vllm-v1
replica: {max_batch_size: 8, max_model_len: 256, memory: {num_blocks: 64}}
replicasets:
  small:
    select: {models: [small, chat], tenants: [gold]}
  large:
    select: {models: [large, chat]}
    scheduling: {preset: sarathi}
    replica: {memory: {num_blocks: 96, block_size: 8}}
backend:
  engine:
    model: MODEL
    replicasets: {large: {model: other}}
"""
GOLD = {"x-llm-d-inference-fairness-id": "gold"}


def write_model(folder: Path, seed: int) -> None:
    script = "from vajra_py.cli.main import main; main()"
    arguments = ["model", "tiny", str(folder), "--seed", str(seed)]
    subprocess.run([sys.executable, "-P", "-c", script, *arguments], check=True, capture_output=True)


def ask(server: Any, model: str, **given: Any) -> httpx.Response:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = given.pop("headers", {})
    return httpx.post(f"{server.url}/v1/completions", json={**body, **given}, headers=headers, timeout=120)


def text(server: Any, model: str, **given: Any) -> str:
    answer = ask(server, model, **given)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    found: str = answer.json()["choices"][0]["text"]
    return found


@pytest.mark.slow
def test_each_name_is_answered_by_its_own_model(
    tmp_path: Path, tiny_model: Path, tiny_server: Any, start_server_process: Callable[..., Any], until: Any
) -> None:
    write_model(tmp_path / "other", 1)
    file = tmp_path / "two.yaml"
    file.write_text(FILE.replace("MODEL", str(tiny_model)))
    server = start_server_process(str(file), "--save-run", str(tmp_path / "session"))
    try:
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "the server is ready", 240)
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert {one["id"]: one["max_model_len"] for one in listed} == {"small": 256, "chat": 256, "large": 256}
        alone = text(tiny_server, "tiny")
        assert text(server, "small", headers=GOLD) == alone
        assert text(server, "large") != alone
        assert text(server, "chat", headers=GOLD) == alone
        assert text(server, "chat") == text(server, "large")
        assert ask(server, "small").json()["error"]["code"] == "no_replicaset"  # of another tenant than gold
        unknown = ask(server, "tiny")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        metrics = list(text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text))
    finally:
        assert server.terminate() == 0, "".join(server.log)
    values = {(one.name, one.labels.get("model_name")): one.value for family in metrics for one in family.samples}
    assert values["vajra:generation_tokens_total", "small"] == 2 * 12
    assert values["vajra:generation_tokens_total", "large"] == 3 * 12
    policies = {
        (one.labels["model_name"], one.labels["policy"])
        for family in metrics
        for one in family.samples
        if one.labels.get("layer") == "replica_scheduler"
    }
    assert policies == {("small", "vllm_v1"), ("large", "fixed_chunk")}
    taken = [
        (row["replicaset"], row["num_output_tokens"])
        for row in RunData.load(tmp_path / "session").requests().to_pylist()
    ]
    assert sorted(taken) == [("large", 12)] * 3 + [("small", 12)] * 2
    assert replay(tmp_path / "session").difference is None


def catalogue(
    replicasets: dict[str, Any], served: tuple[str, ...] = (), engine: dict[str, Any] | None = None
) -> Catalogue:
    mapping = {"version": 1, "preset": "vllm-v1", "replicasets": replicasets}
    return Catalogue(
        system_from_mapping({**mapping, "backend": {"engine": {"model": "models/a", "replicasets": engine or {}}}}),
        served,
    )


OTHER = {"two": {"model": "models/b"}}


@pytest.mark.parametrize(
    ("replicasets", "engine", "served", "says"),
    [
        ({"one": {"select": {"tenants": ["t"]}}, "two": {}}, OTHER, (), "replicasets.two.select.models: is missing"),
        (
            {"one": {"select": {"models": ["m"], "max_prompt_tokens": 9}}, "two": {"select": {"models": ["m"]}}},
            OTHER,
            (),
            "a prompt's length cannot choose between the models of 'one' and 'two'",
        ),
        ({"one": {"select": {"models": ["m"]}}}, {}, ("n",), "--served-model-name: has no effect"),
    ],
)
def test_names_that_could_mean_two_models_are_refused(
    replicasets: dict[str, Any], engine: dict[str, Any], served: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        catalogue(replicasets, served, engine)
    assert says in str(error.value)


def test_replicasets_of_one_model_share_its_name() -> None:
    both = {"long": {"select": {"min_prompt_tokens": 100}}, "rest": {}}
    assert catalogue(both).names == ("a",)
    assert catalogue(both, ("x", "y")).names == ("x", "y")
    assert catalogue(both).behind("a") == ["long", "rest"]
    named = {"batch": {"select": {"models": ["batch"]}}, "rest": {}}
    assert catalogue(named).names == ("batch", "a")
    assert catalogue(named).behind("batch") == ["batch"]
    assert catalogue(named).behind("a") == ["rest"]
