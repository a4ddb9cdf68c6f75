"""Are LoRA adapters served as models of their own?"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.serve.conftest import Puppet, PuppetServer, Strings
from tests.serve.test_serve_models import catalogue
from vajra_py.engine.compute import RunnerOptions, StepInput, StepOutput
from vajra_py.errors import ConfigError


class Adapted(Puppet):
    """A puppet that notes what is loaded, and the adapter of each request."""

    def __init__(self, options: RunnerOptions, strings: Strings) -> None:
        super().__init__(options, strings)
        self.loaded: list[tuple[str, int]] = []
        self.adapters: list[str] = []

    def load_adapter(self, name: str, slot: int) -> None:
        self.loaded.append((name, slot))

    def run(self, step: StepInput) -> StepOutput:
        self.adapters += [row.adapter for row in step.new]
        return super().run(step)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter that is whole, of a model that nobody loads."""
    from safetensors.numpy import save_file

    folder = tmp_path / "french"
    folder.mkdir()
    where = "base_model.model.model.layers.0.mlp.up_proj.lora"
    tensors = {f"{where}_A.weight": np.zeros((2, 8), np.float32), f"{where}_B.weight": np.zeros((8, 2), np.float32)}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapters(folder: Path, *names: str) -> dict[str, Any]:
    return {"models": [{"name": name, "path": str(folder)} for name in names]}


def test_a_request_names_the_adapter_as_its_model(
    puppet_server: Callable[..., PuppetServer], folder: Path, tmp_path: Path
) -> None:
    made: list[Adapted] = []

    def load(options: RunnerOptions) -> Adapted:
        made.append(Adapted(options, Strings()))
        return made[-1]

    replica = {"max_batch_size": 4, "max_model_len": 256, "memory": {"num_blocks": 64}}
    settings = {"replica": {**replica, "adapters": adapters(folder, "french", "legal")}}
    server = puppet_server(settings, load=load, save_run=tmp_path / "session")
    listed = {one["id"]: one for one in httpx.get(f"{server.url}/v1/models").json()["data"]}
    base = str(Path(tmp_path / "puppet"))
    shown = [(name, one["parent"], one["root"]) for name, one in listed.items()]
    assert shown == [("puppet", None, base), ("french", "puppet", str(folder)), ("legal", "puppet", str(folder))]
    assert httpx.get(f"{server.url}/v1/models/legal").json() == listed["legal"]
    for model in ("french", "puppet", "legal", "french"):
        answer = server.post(model=model)
        assert answer.status_code == 200
        assert answer.json()["model"] == model
    assert server.post(adapter="legal").status_code == 200  # the fact itself
    assert [one.adapters for one in made] == [["french", "", "legal", "french", "legal"]]
    assert [one.loaded for one in made] == [[(name, 0) for name in ("french", "legal", "french", "legal")]]
    unknown = server.post(model="german")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "Served: puppet, french, legal" in unknown.json()["error"]["message"]
    for body in ({"adapter": "german"}, {"model": "french", "adapter": "legal"}):
        refused = server.post(**body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "adapter")
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json={}).status_code in (404, 501)


def test_requests_of_several_adapters_wait_for_a_slot_in_turn(
    puppet_server: Callable[..., PuppetServer], folder: Path
) -> None:
    """One slot: each is answered, whoever came first."""
    replica = {"max_batch_size": 4, "max_model_len": 256, "memory": {"num_blocks": 64}}
    names = ("french", "legal", "code")
    settings = {"replica": {**replica, "adapters": adapters(folder, *names)}}
    server = puppet_server(settings, load=lambda options: Adapted(options, Strings()))
    answers: list[int] = []

    def ask(name: str) -> None:
        answers.append(server.post(model=name, max_tokens=30).status_code)

    threads = [threading.Thread(target=ask, args=(name,)) for name in names * 2]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert answers == [200] * 6


@pytest.mark.parametrize(
    ("replicasets", "said"),
    [
        ({"one": ["a"]}, "a model is served under the name of an adapter ('a')"),
        ({"one": ["x"], "two": ["x"]}, "two models have an adapter of one name ('x')"),
    ],
)
def test_names_of_adapters_mean_one_thing(folder: Path, replicasets: dict[str, list[str]], said: str) -> None:
    both = {
        name: {
            "select": {"models": [name] if len(replicasets) > 1 else ["a"]},
            "replica": {"adapters": adapters(folder, *given)},
        }
        for name, given in replicasets.items()
    }
    with pytest.raises(ConfigError) as refused:
        catalogue(both)
    assert said in str(refused.value)


def test_an_adapter_is_behind_the_name_of_its_base_model(folder: Path) -> None:
    found = catalogue(
        {
            "chat": {"select": {"models": ["chat"]}, "replica": {"adapters": adapters(folder, "x")}},
            "both": {"select": {"models": ["chat", "code"]}, "replica": {"adapters": adapters(folder, "z")}},
            "rest": {"replica": {"adapters": adapters(folder, "y")}},
        }
    )
    assert found.names == ("chat", "code", "a", "x", "z", "y")
    assert [found.behind(name) for name in "xyz"] == [["chat"], ["rest"], ["both"]]
    assert found.adapters["z"].parent == "code"
