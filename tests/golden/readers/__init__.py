"""Compare policies that follow other systems with those systems' recorded decisions."""

from __future__ import annotations

from tests.golden.readers.folder import compare_folder
from tests.golden.readers.trace import Difference, Result

__all__ = ["Difference", "Result", "compare_folder"]
