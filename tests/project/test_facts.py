"""A fact that clients state is declared once, and is then found wherever facts are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

from vajra_py.contract import RequestView
from vajra_py.contract.facts import FACTS, StatedFacts

ROOT = Path(__file__).parents[2]
DECLARATION = "vajra_py/contract/facts.py"
VIEW = "vajra_py/contract/requests.py"
MADE_UP = {
    "pool": ("str", '""'),
    "ancestors": ("tuple[str, ...]", "()"),
    "level": ("int | None", "None"),
    "turn": ("int", "0"),
    "urgent": ("bool", "False"),
    "weight": ("float | None", "None"),
    "patience_s": ("float | None", "None"),
}
"""Name, type and default of a fact of every kind."""


def test_views_have_the_facts_that_policies_see() -> None:
    declared = get_type_hints(StatedFacts)
    for fact in FACTS:
        if fact.seen_as is not None:
            shown: Any = getattr(RequestView, fact.seen_as)
            assert get_type_hints(shown.fget)["return"] == declared[fact.name], fact.name


def test_made_up_facts_are_found_wherever_facts_are(tmp_path: Path) -> None:
    """Two files are changed, those that CONTRIBUTING.md names; everything else follows."""
    shutil.copytree(ROOT / "vajra_py", tmp_path / "vajra_py", ignore=shutil.ignore_patterns("__pycache__"))
    lines = [
        f'    {name}: Annotated[{kind}, FactInfo("Made up")] = {default}' for name, (kind, default) in MADE_UP.items()
    ]
    insert(tmp_path / DECLARATION, "    session_id: Annotated[", "\n".join(lines))
    properties = [
        f'    @property\n    def {name}(self) -> {kind}:\n        """Made up."""\n'
        for name, (kind, _) in MADE_UP.items()
    ]
    insert(tmp_path / VIEW, "    def block_hashes(self)", "\n".join(properties))
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "policies", ROOT / "kernels", ROOT)))
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "pythonpath=",  # not this checkout before the copy
        "tests/serve/made_up_facts.py",
    ]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def insert(file: Path, before: str, lines: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, f"{lines}\n{before}"))
