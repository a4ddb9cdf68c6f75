from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vajra_py.contract import Layer
from vajra_py.errors import ConfigError, UnknownNameError
from vajra_py.plugins import load_registry
from vajra_py.plugins.scaffold import KINDS, plugin_names, render_copy, render_plugin, write_plugin

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


def test_the_command_knows_every_kind() -> None:
    from vajra_py.cli.new_plugin import new_plugin

    (kind,) = [one for one in new_plugin.params if one.name == "kind"]
    assert list(kind.type.choices) == list(KINDS)  # type: ignore[attr-defined]


def test_packages_of_other_kinds_pass_their_own_tests(tmp_path: Path) -> None:
    """All in one process; packages of `policies` and `admission` are installed below."""
    folders = [
        write_plugin(f"my-{kind}-lab", tmp_path, kind) for kind in KINDS if kind not in ("policies", "admission")
    ]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-rA"]
    tests += ["--rootdir", str(tmp_path), "-c", os.devnull, *map(str, folders)]
    ran = subprocess.run(tests, cwd=tmp_path, env=_finds(*folders), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
    for folder in folders:
        assert f"PASSED {folder.name}/" in ran.stdout


def test_every_policy_of_the_library_can_be_copied() -> None:
    registry = load_registry()
    names = [(None, name) for layer in Layer for name in registry.policies(layer)]
    names += [("admission", name) for name in registry.admission_policies]
    names += [("scaler", name) for name in registry.scalers]
    names += [("retention", name) for name in registry.retention_policies]
    for kind, name in names:
        files = render_copy("my-lab", name, kind)
        assert f"[my_lab_{name}, {name}]" in files["experiment.yaml"]
        source = "".join(
            text for path, text in files.items() if path.startswith("src/my_lab/") and "__init__" not in path
        )
        compile(source, name, "exec")
        assert f'name="my_lab_{name}"' in source
        assert f'name="{name}"' not in source
        assert "aliases=" not in source


def test_the_table_of_what_to_start_from_names_files_of_policies() -> None:
    page = (ROOT / "docs" / "writing-a-policy.md").read_text(encoding="utf-8")
    rows = page.partition("## Start from a policy of the library\n")[2].partition("|---|---|\n")[2].strip().splitlines()
    assert len(rows) >= 10, "it ends the page"
    for file, name in re.findall(r"`([\w/]+\.py)`(?: \(`(\w+)`\))?", "\n".join(rows)):
        path = ROOT / "policies" / "vajra_policies" / file
        assert f'name="{name or path.stem}"' in path.read_text(encoding="utf-8"), file


COPIES = [
    (None, "vtc"),
    (None, "preble_e2"),
    (None, "space_sharing"),
    (None, "least_loaded"),
    ("retention", "lru"),
    ("scaler", "target_utilization"),
]


COMPARED = """
import importlib, json, sys
import vajra_py
for folder in sys.argv[1:]:
    package = importlib.import_module(folder.rpartition("/")[2].replace("-", "_"))
    specs = [one for hook in package.__all__ for one in getattr(package, hook)()]
    text, swept = open(folder + "/experiment.yaml").read().split("sweep:")
    open(folder + "/one.yaml", "w").write(text)
    key, names = swept.split("scheduling.")[1].split(":")
    copy, original = names.strip(" []\\n").split(", ")
    runs = []
    for name in (copy, original):
        overrides = {f"scheduling.{key}": name, "workload.num_requests": 60, "workload.rate": 30}
        config = vajra_py.load(folder + "/one.yaml", overrides, policies=specs)
        done = vajra_py.run(config, policies=specs, folder=folder + "/" + name)
        runs.append(repr(done.requests().to_pylist()))  # NaN is unlike itself
    print(json.dumps([copy, original, runs[0].count("request_id"), runs[0] == runs[1]]))
"""


@pytest.mark.slow
def test_a_copy_decides_as_its_original(tmp_path: Path) -> None:
    folders = [write_plugin(f"my-{name}", tmp_path, kind, name) for kind, name in COPIES]
    paths = os.pathsep.join([*(str(one / "src") for one in folders), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", COMPARED, *map(str, folders)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    compared = [json.loads(line) for line in done.stdout.splitlines()]
    assert compared == [[f"my_{name}_{name}", name, 60, True] for _, name in COPIES]


def test_a_copy_passes_its_own_tests(tmp_path: Path) -> None:
    folder = write_plugin("my-lab", tmp_path, original="vtc")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    ran = subprocess.run(tests, cwd=folder, env=_finds(folder), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "1 passed" in ran.stdout


def test_what_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"'vtcc'.*vtc"):
        write_plugin("my-lab", tmp_path, original="vtcc")
    with pytest.raises(UnknownNameError, match="'vtc'"):
        write_plugin("my-lab", tmp_path, "retention", "vtc")
    assert not list(tmp_path.iterdir())


def _finds(*folders: Path) -> dict[str, str]:
    """Return an environment in which packages can be imported from their folders."""
    paths = [*(str(folder / "src") for folder in folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_a_scaler_from_the_template_is_selected_by_name(tmp_path: Path) -> None:
    folder = write_plugin("my-lab", tmp_path, "scaler")
    program = (
        "import sys; from my_lab import vajra_scalers; from vajra_py.config import load_config; "
        "from vajra_py.plugins import load_registry; "
        "config = load_config(sys.argv[1], (), load_registry().with_policies(vajra_scalers())); "
        "print(config.scheduling.scaling.policy, config.scheduling.scaling.params['calm_s'])"
    )
    command = [sys.executable, "-c", program, str(folder / "experiment.yaml")]
    done = subprocess.run(command, env=_finds(folder), check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["my_lab_queue_steps", "20.0"]


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
