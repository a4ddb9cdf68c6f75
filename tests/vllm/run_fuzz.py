"""Plays many random sessions of `tests/vllm/fuzz.py`, and prints each that differs. `make vllm-fuzz`."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

from vllm import platforms
from vllm.platforms.cpu import CpuPlatform


def main() -> int:
    """Play sessions, and print each that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=100, help="how many sessions")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument(
        "--kind",
        choices=(
            "plain",
            "windows",
            "states",
            "adapters",
            "drafts",
            "windows-drafts",
            "connector",
            "connector-adapters",
            "connector-drafts",
            "connector-windows",
            "connector-windows-drafts",
        ),
        default="plain",
        help="what is special about the model",
    )
    parser.add_argument("--model", help="folder of a model; default: a tiny one is made")
    given = parser.parse_args()
    if platforms.current_platform.is_unspecified():  # a GPU build on a machine without a GPU
        platforms.current_platform = CpuPlatform()
    logging.disable(logging.CRITICAL)
    from tests.vllm import connector_fuzz, fuzz  # after the platform: vLLM's modules keep it when they are imported

    total: Counter[str] = Counter()
    differ: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        model = given.model
        if model is None:
            from vajra_py.engine.tiny import write_tiny_model

            model = f"{folder}/model"
            write_tiny_model(Path(model))
        for seed in range(given.first, given.first + given.count):
            if given.kind.startswith("connector"):
                kind = given.kind.partition("-")[2] or "plain"
                found, counts = connector_fuzz.compare(model, seed, is_async=given.mode == "async", kind=kind)
            else:
                found, counts = fuzz.compare(model, seed, is_async=given.mode == "async", kind=given.kind)
            total += counts
            if found is not None:
                differ.append(seed)
                print(seed, found[:600], flush=True)
    from vajra_py.vllm.support import installed_version

    print(
        f"vLLM {installed_version()} {given.mode} {given.kind}: {given.count} sessions, {len(differ)} differ {differ}; {dict(total)}"
    )
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
