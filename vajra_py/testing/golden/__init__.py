"""Compare policies that follow other systems with those systems' recorded decisions."""

from __future__ import annotations

from vajra_py.testing.golden.folder import compare_folder
from vajra_py.testing.golden.trace import Difference, Result

__all__ = ["Difference", "Result", "compare_folder"]
