"""Do policies that follow other systems decide what those systems decided? Comparison with recorded runs."""

from __future__ import annotations

from vajra_py.testing.golden.folder import compare_folder
from vajra_py.testing.golden.trace import Difference, Result

__all__ = ["Difference", "Result", "compare_folder"]
