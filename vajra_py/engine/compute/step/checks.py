"""Check a runner's options before a model is loaded."""

from __future__ import annotations

from vajra_py.engine.compute.interface import RunnerOptions
from vajra_py.errors import ConfigError, Problem


def check_options(options: RunnerOptions) -> None:
    """Raise `ConfigError` for sizes that are out of range."""
    problems = []
    if options.block_size < 1:
        problems.append(Problem("block_size", f"not positive ({options.block_size})", "Allowed: 16 to 128 tokens"))
    if options.max_requests < 1:
        problems.append(Problem("max_requests", f"not positive ({options.max_requests})", "Allowed: 1 or more"))
    if options.max_graph_rows < 0:
        problems.append(Problem("max_graph_rows", f"negative ({options.max_graph_rows})", "Allowed: 0 or more"))
    if options.num_threads is not None and options.num_threads < 1:
        problems.append(Problem("num_threads", f"not positive ({options.num_threads})", "Allowed: 1 or more"))
    if not 0 <= options.rank < options.num_ranks:
        problems.append(Problem("rank", f"no such rank ({options.rank} of {options.num_ranks})", "Ranks count from 0"))
    if problems:
        raise ConfigError(problems)
