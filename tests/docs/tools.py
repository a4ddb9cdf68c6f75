"""The scripts of docs/tools, imported by path."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).resolve().parents[2] / "docs" / "tools"


def tool(name: str) -> ModuleType:
    """Return the script of that name."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = tool("hooks")
GENERATED = hooks.GENERATED
generated_page = hooks.generated_page
