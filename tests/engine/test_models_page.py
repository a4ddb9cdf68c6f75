"""Does the page of models name what the engine runs?"""

from __future__ import annotations

from pathlib import Path

from vajra_py.engine.compute.model.fused import KNOWN_TYPES
from vajra_py.engine.tiny import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def test_every_family_of_the_tests_is_among_the_tested_ones() -> None:
    tested = PAGE.read_text(encoding="utf-8").partition("## Tested families")[2].partition("\n## ")[0]
    missing = [name for name in sorted(KNOWN_TYPES | set(FAMILIES)) if f"`{name}`" not in tested]
    assert not missing, f"python benchmarks/model_types.py --write docs/reference/models.md lists them anew ({missing})"
