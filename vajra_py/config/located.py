"""Add file and line to mistakes found after loading, while objects are built from the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from vajra_py.config.places import Entries, has, locate, parse_path
from vajra_py.errors import ConfigError, Problem, WorkloadError

if TYPE_CHECKING:
    from vajra_py.config.schema import SystemConfig

_PATH = re.compile(r"[a-z_]+(\.[\w-]+)*")


@contextmanager
def naming_lines(config: SystemConfig) -> Iterator[None]:
    """Add file and line to the problems of a `ConfigError` that is raised in the block.

    A problem stays unchanged if its setting is not in a file.
    """
    try:
        yield
    except WorkloadError:
        raise
    except ConfigError as error:
        source = config._source
        if source is None:
            raise
        raise ConfigError(_located(problem, source.root) for problem in error.problems) from error


def _located(problem: Problem, root: Entries) -> Problem:
    """Return the problem with file and line of its setting, or of the nearest section around it; return the problem
    unchanged if the file has no such section.
    """
    if not _PATH.fullmatch(problem.where):
        return problem
    path = parse_path(problem.where)
    if not has(root, path[0]):
        return problem
    return replace(problem, where=locate(root, path).where(path))
