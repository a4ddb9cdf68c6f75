"""Two policies on one real vLLM: run them, compare them, and let the simulator decide every step again.

Run it with `make vllm`, or `python examples/vllm_demo.py [FOLDER]` in an environment that has vLLM; the experiment is `examples/vllm.yaml`. It writes the
model, both runs and `vllm.html` (the report) into the folder.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from vajra_py.cli.main import main

HERE = Path(__file__).parent


def vajra(*arguments: str) -> None:
    """Run a `vajra` command."""
    print(f"\n$ vajra {' '.join(arguments)}", flush=True)
    try:
        main(list(arguments))
    except SystemExit as ended:
        if ended.code:
            raise


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.simplefilter("ignore", FutureWarning)  # of vLLM's libraries about themselves
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/vllm-demo")
    model, runs = target / "model", target / "runs"
    if not model.exists():
        vajra("model", "tiny", str(model))
    settings = ["--set", f"backend.vllm.model={model}", "--set", f"output.dir={runs}"]
    vajra("run", str(HERE / "vllm.yaml"), *settings, "--report", str(target / "vllm.html"), "--quiet")
    each = sorted(str(path.parent) for path in runs.rglob("manifest.json"))
    vajra("compare", *each, "--scope", "slo_class chat")
    vajra("replay", *each)
