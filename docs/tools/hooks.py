"""Hooks of MkDocs: generated pages, and search without a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GENERATED: Mapping[str, str] = {"reference/configuration.md": "configuration.py", "reference/devices.md": "devices.py"}
"""The script beside this one that generates a page."""


REMOTE_SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
"""Loaded by the theme so that search works from disk; `assets/frame-worker.js` does it without a network."""


def generated_page(name: str) -> str:
    """Return the text of a generated page."""
    path = Path(__file__).with_name(GENERATED[name])
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page: Callable[[], str] = module.page
    return page()


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for name in GENERATED:
        files.append(File.generated(config, name, content=generated_page(name)))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Replace the theme's remote script by the local one."""
    return _without_remote_script(output, "../" * page.url.count("/"))


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Replace the theme's remote script in pages without Markdown (404)."""
    return _without_remote_script(output, "")


def _without_remote_script(output: str, root: str) -> str:
    return output.replace(REMOTE_SHIM, f'<script src="{root}assets/frame-worker.js"></script>')
