"""What a user has after installation: three import names, one version, a command, and no generic top-level packages."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vajra_py

IMPORT_NAMES = ("vajra_py", "vajra_policies", "vajra_kernels")


def run_python(code: str, folder: Path) -> str:
    """The output of a fresh interpreter started in `folder`, which is also on its path, as for a user's own script."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_is_written_once(repository_root: Path) -> None:
    project = tomllib.loads((repository_root / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "vajra_py.__version__"}
    assert importlib.metadata.version("vajra-py") == vajra_py.__version__


def test_import_names_are_found_from_any_folder(tmp_path: Path) -> None:
    code = f"import importlib; [importlib.import_module(n) for n in {IMPORT_NAMES!r}[:2]]; import importlib.util as u; "
    code += "print(u.find_spec('vajra_kernels').origin)"
    assert run_python(code, tmp_path).strip().endswith("vajra_kernels/__init__.py")


@pytest.mark.parametrize("name", ["kernels", "policies", "tests", "docs", "examples", "benchmarks"])
def test_installation_makes_no_generic_name_importable(name: str, tmp_path: Path) -> None:
    code = f"import importlib.util as u; spec = u.find_spec({name!r}); print(spec and (spec.origin or list(spec.submodule_search_locations)))"
    found = run_python(code, tmp_path).strip()
    assert found == "None" or "site-packages" in found, f"{name} is importable from {found}"


@pytest.mark.parametrize("folder", ["kernels", "policies", "tests", "docs", "examples", "benchmarks"])
def test_top_folders_are_not_packages(folder: str, repository_root: Path) -> None:
    assert not (repository_root / folder / "__init__.py").exists()


def test_every_entry_point_loads() -> None:
    entry_points = importlib.metadata.distribution("vajra-py").entry_points
    loaded = {(point.group, point.name): point.load() for point in entry_points}
    command, policies, vllm = ("console_scripts", "vajra"), ("vajra", "builtin"), ("vllm.general_plugins", "vajra")
    assert set(loaded) == {command, policies, vllm}
    assert callable(loaded[command])
    assert loaded[policies].__name__ == "vajra_policies"
    assert callable(loaded[vllm])


def test_typed_markers_ship_with_each_import_name(repository_root: Path) -> None:
    for folder in ("vajra_py", "policies/vajra_policies", "kernels/vajra_kernels"):
        assert (repository_root / folder / "py.typed").is_file(), folder


def test_importing_the_package_loads_only_the_standard_library(tmp_path: Path) -> None:
    code = "import json, sys; before = set(sys.modules); import vajra_py; print(json.dumps(sorted(set(sys.modules) - before)))"
    loaded = {name.partition(".")[0] for name in json.loads(run_python(code, tmp_path))}
    assert "vajra_py" in loaded
    assert loaded - {"vajra_py"} <= sys.stdlib_module_names


def test_packages_load_on_first_use(tmp_path: Path) -> None:
    code = "import sys, vajra_py; early = 'vajra_py.errors' in sys.modules; print(early, vajra_py.errors.VajraError.__name__)"
    assert run_python(code, tmp_path).split() == ["False", "VajraError"]


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'vajra_py' has no attribute 'simulator'"):
        vajra_py.simulator  # noqa: B018


def test_the_front_door_offers_what_it_lists_and_nothing_else(repository_root: Path) -> None:
    stub = ast.parse((repository_root / "vajra_py" / "__init__.pyi").read_text(encoding="utf-8"))
    imported = {alias.asname for node in ast.walk(stub) if isinstance(node, ast.ImportFrom) for alias in node.names}
    named = {name for name in imported if name is not None}
    offered = {name for name in dir(vajra_py) if not name.startswith("_")}
    assert offered == named | set(vajra_py.contract.__all__)
    assert named >= set(vajra_py.api.__all__)
    assert named >= {
        "load",
        "run",
        "sweep",
        "compare",
        "open_runs",
        "report",
        "plots",
        "LLM",
        "AsyncLLM",
        "SamplingParams",
    }
    for name in sorted(offered):
        assert getattr(vajra_py, name) is not None


def test_the_front_door_loads_no_tensor_library_before_it_is_needed(tmp_path: Path) -> None:
    code = "import sys, vajra_py as vajra; vajra.load, vajra.run, vajra.KeyMotion; print('torch' in sys.modules)"
    assert run_python(code, tmp_path).strip() == "False"
