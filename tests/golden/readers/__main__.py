"""`python -m tests.golden.readers DIR`: compare every recorded run below a folder; exit code 1 if any differs."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.golden.readers.folder import report


def main() -> int:
    """Run the comparison that the command line asks for."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m tests.golden.readers DIR\n")
        return 2
    folder = Path(sys.argv[1])
    if not folder.is_dir():
        sys.stderr.write(f"{folder}: not a folder\n")
        return 2
    return 0 if report(folder, sys.stdout) else 1


if __name__ == "__main__":
    sys.exit(main())
