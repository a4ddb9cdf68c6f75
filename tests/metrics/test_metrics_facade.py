"""The package's front door: light to import, sorted, complete."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vajra_py import metrics


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = (
        "import sys, vajra_py.metrics\n"
        "heavy = {'numpy', 'pandas', 'pyarrow', 'matplotlib', 'jinja2', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from vajra_py.metrics import Summary, RequestsBuilder, RunData, compare, plots, write_report, write_timeline\n"
        "heavy = {'pandas', 'pyarrow', 'matplotlib', 'jinja2', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert callable(compare)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_sorted_and_resolve() -> None:
    constants = [name for name in metrics.__all__ if name.isupper()]
    classes = [name for name in metrics.__all__ if name[0].isupper() and name not in constants]
    functions = [name for name in metrics.__all__ if name[0].islower()]
    assert metrics.__all__ == sorted(constants) + sorted(classes) + sorted(functions)
    assert all(getattr(metrics, name) is not None for name in metrics.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = metrics.no_such_name
