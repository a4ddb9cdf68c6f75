import importlib.util
import os

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


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
