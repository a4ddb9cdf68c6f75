"""What is wrong with a cluster is said in one line, before anything runs."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import vajra_py
from tests.cluster.nodes import SWEEP, LocalCluster
from vajra_py.cluster import connect
from vajra_py.cluster.connect import RayCluster, ray_cluster
from vajra_py.cluster.files import Workspace
from vajra_py.cluster.fingerprint import code_digest, fingerprint
from vajra_py.cluster.node import RemoteRun, execute_run
from vajra_py.cluster.pool import RayPool
from vajra_py.config import config_from_mapping
from vajra_py.contract import Layer
from vajra_py.errors import ConfigError, RunError
from vajra_py.experiment.runs.pool import RunTask
from vajra_py.plugins import load_registry

SINGLE = config_from_mapping({name: value for name, value in SWEEP.items() if name != "sweep"})


def ray_of_nobody() -> MagicMock:
    ray = MagicMock(exceptions=importlib.import_module("ray").exceptions)
    ray.get_runtime_context().get_node_id.return_value = "0" * 56
    return ray


def said_of(on: str) -> str:
    with pytest.raises((ConfigError, RunError)) as caught, ray_cluster(on):
        raise AssertionError("there is no such cluster")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_local_needs_no_ray() -> None:
    with ray_cluster("local") as cluster:
        assert cluster is None


@pytest.mark.parametrize("on", ["lokal", "host", "http://host:1", "host:port", "", "ray://host"])
def test_what_is_no_place_is_refused(on: str) -> None:
    assert said_of(on).startswith(f"--on: is not a place to run on ({on!r}). Allowed: local, auto")


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert said_of(f"ray://127.0.0.1:{port}").startswith(
        f"--on ray://127.0.0.1:{port}: the cluster cannot be reached ("
    )
    assert said_of(f"127.0.0.1:{port}").startswith(f"--on 127.0.0.1:{port}: the cluster cannot be reached (")
    assert "cannot be reached" in said_of("127.0.0.1:99999")
    assert "cannot be reached" in said_of("a..b:10")


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert said_of("auto") == (
        '--on: runs on Ray, which is not installed (ray). Install the extra: pip install "vajra-py[ray]".'
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.0.0\n    Python: 3.9.1"),
            "--on auto: the cluster has another version of Ray or Python (Version mismatch: The cluster was started with: "
            "Ray: 2.0.0 Python: 3.9.1).",
        ),
        (
            ConnectionError("Could not find any running Ray instance."),
            "--on auto: the cluster cannot be used (Could not",
        ),
    ],
)
def test_ray_refuses(monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str) -> None:
    class Ray:
        def init(self, **options: Any) -> None:
            raise error

    monkeypatch.setattr(connect, "_import_ray", Ray)
    assert said_of("auto").startswith(expected)


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_client_whose_process_ray_lost_at_its_start_asks_once_more(num_failures: int) -> None:
    class Ray:
        num_calls = 0

        def init(self, **options: Any) -> None:
            self.num_calls += 1
            if self.num_calls <= num_failures:
                raise ConnectionAbortedError("Initialization failure from server: psutil.ZombieProcess")

    ray = Ray()
    with pytest.raises(RunError, match="the cluster cannot be used") if num_failures > 1 else nullcontext():
        connect._connect(ray, "ray://127.0.0.1:1")
    assert ray.num_calls == 2


def test_a_fingerprint_tells_code_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_module.py").write_text("x = 1\n")
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    before = [code_digest("one_module"), code_digest("a_package.inner")]
    assert before == [code_digest("one_module"), code_digest("a_package")]
    (tmp_path / "one_module.py").write_text("x = 2\n")
    (package / "inner.py").write_text("")
    importlib.invalidate_caches()
    assert all(
        one != other for one, other in zip(before, [code_digest("one_module"), code_digest("a_package")], strict=True)
    )
    found = fingerprint()
    assert {"python", "vajra-py", "pyarrow", "code of vajra_py", "plug-in builtin of vajra-py"} <= set(found)


def test_a_node_that_joins_later_with_another_version_fails_its_runs() -> None:
    asker = fingerprint() | {"vajra-py": "9.9.9"}
    result = execute_run(RemoteRun(0, SWEEP, [], Workspace("vajra-test", "/"), asker), None)
    assert result.files == {}
    assert result.error is not None
    assert result.error.startswith("node ")
    assert result.error.endswith("; here: 9.9.9). Every node needs what this machine has.")


def test_results_that_could_not_be_written_are_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RayPool(RayCluster(ray_of_nobody(), fingerprint()))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        pool.submit(0, RunTask(SINGLE, tmp_path / "file/runs/single"))
    assert caught.value.filename == str(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write everywhere
    with pytest.raises(PermissionError):
        pool.submit(0, RunTask(SINGLE, tmp_path / "runs/single"))
    assert list(pool.ends()) == []


def test_a_cluster_that_is_lost_ends_a_command_in_a_line_and_no_other_is_begun(tmp_path: Path) -> None:
    ray = ray_of_nobody()
    ray.wait.side_effect = ConnectionError("Client is shutting down.")
    lost = RayPool(RayCluster(ray, fingerprint()))
    lost.submit(0, RunTask(SINGLE, tmp_path / "run"))
    with pytest.raises(RunError, match=r"^--on: the cluster is lost \(Client is shutting down\)\. Finished runs are"):
        list(lost.ends())
    ray.is_initialized.return_value = False
    ray.reset_mock()
    lost.close()
    assert [name for name, *_ in ray.method_calls] == ["is_initialized"]


def test_a_node_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vajra_py.cluster.fingerprint", None)
    assert connect._probe()().startswith("cannot import vajra-py (")


def test_policies_of_a_script_do_not_go_to_a_cluster(tmp_path: Path) -> None:
    config = config_from_mapping(SWEEP | {"output": {"dir": str(tmp_path)}})
    spec = replace(load_registry().policy(Layer.REQUEST_PRIORITIZER, "fcfs").spec, name="mine")
    for call in (vajra_py.run, vajra_py.sweep):
        with pytest.raises(
            ConfigError, match=r"^on: policies that are not installed run in this process alone \('auto'\)"
        ):
            call(config, on="auto", policies=[spec])


@pytest.mark.slow
def test_a_node_with_another_version(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "fingerprint", lambda: fingerprint() | {"vajra-py": "9.9.9"})
    text = said_of(cluster.address)
    assert text.startswith("node ")
    assert ": has another vajra-py (" in text
    assert text.endswith("; here: 9.9.9). Every node needs what this machine has.")
