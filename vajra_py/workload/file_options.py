"""Options of workloads that are read from files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from vajra_py.workload.distributions import Positive
from vajra_py.workload.options import Count, WorkloadOptions, WorkloadSection

__all__ = ["SAMPLING_OPTIONS", "BootstrapConfig", "FileOptions", "ThinConfig", "TraceOptions"]


class BootstrapConfig(WorkloadSection):
    """Block bootstrap: replace a trace by blocks that are drawn from it with the seed. Requests of one session stay
    together.
    """

    block_s: Positive | None = Field(None, description="Length of a block, in the source's seconds.")
    block_requests: Count | None = Field(
        None, description="Length of a block in requests (in sessions, where there are any)."
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> BootstrapConfig:
        if (self.block_s is None) == (self.block_requests is None):
            raise ValueError("needs either block_s or block_requests. Allowed: one of the two")
        return self


class ThinConfig(WorkloadSection):
    """Thinning: keep a random part of a trace, drawn with the seed. Requests of one session stay together."""

    rate: Positive | None = Field(
        None, description="Requests per second (of the source's) that are left on average; below the trace's own rate."
    )
    fraction: float | None = Field(None, gt=0, lt=1, description="Fraction of the requests that is kept on average.")

    @model_validator(mode="after")
    def _one_of_two(self) -> ThinConfig:
        if (self.rate is None) == (self.fraction is None):
            raise ValueError("needs either rate or fraction. Allowed: one of the two")
        return self


class FileOptions(WorkloadOptions):
    """Options of workloads that are read from a file.

    A relative path is looked up in `base_folder` of pydantic's validation context (the folder of the settings file),
    then in the folder passed to `source`.
    """

    path: str = Field(min_length=1, description="The file, plain or gzip'd.")
    window: Literal["random"] | None = Field(
        None,
        description="random: `first` or `window_s` select requests from a position drawn with the seed; null: from the start.",
    )
    window_s: Positive | None = Field(None, description="Duration of a random window, in seconds of the trace.")
    bootstrap: BootstrapConfig | None = Field(
        None,
        description="Concatenate blocks of the trace, drawn with the seed, to a trace of the same duration; null: the trace as it is.",
    )
    thin: ThinConfig | None = Field(
        None, description="Keep a random part of the requests, drawn with the seed; null: all."
    )

    @field_validator("path")
    @classmethod
    def _seen_from_base_folder(cls, path: str, info: ValidationInfo) -> str:
        folder = info.context.get("base_folder") if isinstance(info.context, dict) else None
        if folder is not None and not Path(path).is_absolute() and (Path(folder) / path).exists():
            return str(Path(folder) / path)
        return path

    @model_validator(mode="after")
    def _sampled_in_one_way(self) -> FileOptions:
        if self.window is not None and (self.first is None) == (self.window_s is None):
            given = f"first: {self.first}, window_s: {self.window_s}".replace("None", "null")
            raise ValueError(
                f"window: random needs one length (got {given}). Allowed: first, in requests, or window_s, in seconds"
            )
        if self.window is None and self.window_s is not None:
            message = f"window_s is the length of a window, but window is missing (got {self.window_s:g})"
            raise ValueError(f"{message}. Allowed: together with window: random")
        if self.window is not None and self.bootstrap is not None:
            raise ValueError("window and bootstrap both resample the trace. Allowed: one of the two")
        if self.thin is not None and self.rate is not None:
            raise ValueError("thin and rate both set the pace. Allowed: one of the two")
        return self


SAMPLING_OPTIONS = frozenset({"window", "window_s", "bootstrap", "thin"})
"""Options that replace a trace by a random sample of it."""


class TraceOptions(FileOptions):
    """Options of traces whose rows may be out of order, or may have 0 prompt or output tokens."""

    sort: bool = Field(False, description="Sort requests by arrival; otherwise times out of order are an error.")
    drop_empty: bool = Field(
        False,
        description="Leave out requests of 0 prompt or output tokens and report their number; otherwise they are an error.",
    )
