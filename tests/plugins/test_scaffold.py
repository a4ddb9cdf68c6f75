from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vajra_py.errors import ConfigError
from vajra_py.plugins import write_plugin
from vajra_py.plugins.scaffold import KINDS, plugin_names, render_plugin

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin_template"
LEFTOVERS = {"__pycache__", "build", ".pytest_cache", ".ruff_cache", ".mypy_cache"}


def test_the_example_is_what_the_template_writes() -> None:
    on_disk = {
        path.relative_to(EXAMPLE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(EXAMPLE.rglob("*"))
        if path.is_file() and not any(part in LEFTOVERS or part.endswith(".egg-info") for part in path.parts)
    }
    assert on_disk == render_plugin("vajra-example-policies")


@pytest.mark.parametrize(
    ("name", "distribution", "package", "prefix"),
    [
        ("my-lab", "my-lab", "my_lab", "my_lab"),
        ("My Lab_policies", "my-lab-policies", "my_lab_policies", "my_lab"),
        ("vajra-example-policies", "vajra-example-policies", "vajra_example_policies", "example"),
        ("vajra_x", "vajra-x", "vajra_x", "x"),
    ],
)
def test_names_follow_from_one(name: str, distribution: str, package: str, prefix: str) -> None:
    names = plugin_names(name)
    assert (names.distribution, names.package, names.prefix) == (distribution, package, prefix)


@pytest.mark.parametrize(
    "name", ["", "3d", "a/b", "../x", "class", "json", "vajra-py", "vajra_policies", "x", "é-lab", "a-"]
)
def test_what_cannot_be_a_packages_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="NAME: "):
        write_plugin(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = write_plugin("my-lab", tmp_path)
    mine = folder / "README.md"
    mine.write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        write_plugin("my-lab", tmp_path)
    assert mine.read_text() == "mine"
    (tmp_path / "empty-lab").mkdir()
    assert (write_plugin("empty-lab", tmp_path) / "pyproject.toml").is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_renamed_throughout(kind: str, tmp_path: Path) -> None:
    folder = write_plugin("my-lab", tmp_path, kind)
    assert (folder / "src" / "my_lab" / "__init__.py").is_file()
    for path in folder.rglob("*"):
        assert "example" not in path.name
        assert "__package__" not in str(path)
        if path.is_file():
            text = path.read_text()
            assert "{{" not in text
            assert "vajra_example" not in text
            assert "example_" not in text
        if path.suffix == ".py":
            compile(path.read_text(), str(path), "exec")


PROGRAM = """
import json, sys
from vajra_py.config import load_config
from vajra_py.contract import Layer
from vajra_py.plugins import load_registry
registry = load_registry()
config = load_config(sys.argv[1], [f"name={sys.argv[2]}"])
print(json.dumps({
    layer.value: [choice.policy, choice.params, registry.policy(layer, choice.policy).package]
    for layer in Layer for choice in [config.scheduling.choice(layer)]
}))
"""


@pytest.mark.slow
def test_an_installed_package_is_selected_by_name_and_passes_its_own_tests(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns(*LEFTOVERS, "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", PROGRAM, str(source / "experiment.yaml"), "installed"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    chosen = json.loads(done.stdout)
    assert chosen["request_prioritizer"] == [
        "example_aging_shortest",
        {"forgiven_tokens": 4096, "default_ttft_slo_s": 5.0},
        "vajra-example-policies",
    ]
    assert chosen["replicaset_scheduler"][0] == "example_prefix_affinity"
    assert chosen["replica_scheduler"][1] == {"chunk_tokens": 2048, "capped_chunk_tokens": 256}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    ran = subprocess.run(tests, cwd=source, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]


ADMISSION_PROGRAM = """
import json, sys
from vajra_py.config import load_config
config = load_config(sys.argv[1])
print(json.dumps([config.admission_policy.policy, config.admission_policy.params]))
"""


@pytest.mark.slow
def test_an_installed_admission_policy_is_selected_by_name_and_passes_its_own_tests(tmp_path: Path) -> None:
    source, site = write_plugin("gate-lab", tmp_path, "admission"), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", ADMISSION_PROGRAM, str(source / "experiment.yaml")]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    name, params = json.loads(done.stdout)
    assert name == "gate_lab_shorten_when_busy"
    assert params["short_answer_tokens"] == 64
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    ran = subprocess.run(tests, cwd=source, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
