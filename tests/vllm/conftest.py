import importlib.util
import os
from pathlib import Path

import pytest

SCHEDULERS_ALONE = (
    "test_vllm_agents.py",
    "test_vllm_async.py",
    "test_vllm_connector.py",
    "test_vllm_connector_async.py",
    "test_vllm_decisions.py",
    "test_vllm_draft_sessions.py",
    "test_vllm_drafts.py",
    "test_vllm_drafts_async.py",
    "test_vllm_faults.py",
    "test_vllm_fuzz.py",
    "test_vllm_idle.py",
    "test_vllm_interface.py",
    "test_vllm_lora.py",
    "test_vllm_recording.py",
    "test_vllm_refusals.py",
    "test_vllm_states.py",
    "test_vllm_windows.py",
)
"""Test files that run no model."""
collect_ignore_glob = ["test_*.py"]
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
if importlib.util.find_spec("vllm"):
    from vllm import platforms

    collect_ignore_glob = []
    if (
        platforms.current_platform.is_unspecified()
    ):  # a GPU build on a machine without a GPU: schedulers run, models do not
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
        others = sorted(path.name for path in Path(__file__).parent.glob("test_*.py"))
        collect_ignore_glob = [name for name in others if name not in SCHEDULERS_ALONE]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from vajra_py.engine.tiny import write_tiny_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return str(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings of vLLM and its libraries, and resources that they leave open until the process ends."""
    for item in items:
        if "tests/vllm/" in item.nodeid or item.path.parent.name == "vllm":
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_report_header() -> str | None:
    if not importlib.util.find_spec("vllm"):
        return None
    from vajra_py.vllm.support import installed_version

    return f"vLLM {installed_version()}" + (", its schedulers alone" if collect_ignore_glob else "")
