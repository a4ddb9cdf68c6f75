import importlib.util
import os

import pytest

RUN_MODELS = ["test_vllm_policies.py", "test_vllm_real.py", "test_vllm_serve.py", "test_vllm_parallel.py"]
collect_ignore_glob = ["test_*.py"]
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if importlib.util.find_spec("vllm"):
    from vllm import platforms

    collect_ignore_glob = []
    if (
        platforms.current_platform.is_unspecified()
    ):  # a build for GPUs on a machine without: its schedulers run, no model does
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
        collect_ignore_glob = RUN_MODELS


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from vajra_py.engine.tiny import write_tiny_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return str(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What vLLM and its libraries warn of is theirs; what is left open by them is closed when the process ends."""
    for item in items:
        if "tests/vllm/" in item.nodeid or item.path.parent.name == "vllm":
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_report_header() -> str | None:
    if not importlib.util.find_spec("vllm"):
        return None
    from vajra_py.vllm.support import installed_version

    return f"vLLM {installed_version()}" + (", its schedulers alone" if collect_ignore_glob else "")
