"""`type: mooncake`: a Mooncake trace."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from vajra_py.workload.distributions import NonNegative
from vajra_py.workload.file_options import TraceOptions
from vajra_py.workload.options import Count
from vajra_py.workload.readers.mooncake import MooncakeOptions, read_mooncake
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload


class MooncakeConfig(TraceOptions):
    """A Mooncake trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids (prefix blocks)."""

    type: Literal["mooncake"]
    block_tokens: Count = Field(512, description="Tokens of a hashed block.")
    tick_s: NonNegative = Field(
        0.0,
        description="Seconds after its timestamp over which each request is spread uniformly (conversation trace: 3).",
    )

    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before the common options are applied."""
        options = MooncakeOptions(self.block_tokens, self.tick_s, self.drop_empty, self.sort)
        return read_mooncake(base_dir / self.path, options, rng_for("dither") if self.tick_s else None)
