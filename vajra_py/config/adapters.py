"""Schema of `replica.adapters`: the LoRA adapters that a replica serves beside its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from vajra_py.config.sections import NAME_PATTERN, Count, PositiveCount, Seconds, Section, Text


def _seen_from_base_folder(path: str, info: ValidationInfo) -> str:
    folder = info.context.get("base_folder") if isinstance(info.context, dict) else None
    return path if folder is None else str(Path(folder) / Path(path).expanduser())


AdapterFolder: TypeAlias = Annotated[Text, AfterValidator(_seen_from_base_folder)]


class AdapterConfig(Section):
    """One adapter."""

    name: str = Field(pattern=NAME_PATTERN, description="Name by which requests select the adapter.")
    num_blocks: Count = Field(0, description="Memory that its weights occupy while it is in a slot, KV blocks.")
    load_s: Seconds = Field(
        0.0,
        description="Simulated time to load it into a slot while steps run, seconds.",
    )
    path: AdapterFolder | None = Field(
        None, description="Folder that `peft` wrote, with adapter_config.json; the engine needs one, simulations none."
    )


class AdaptersConfig(Section):
    """The adapters that a replica can load, and the slots for them."""

    max_loras: PositiveCount = Field(
        1,
        description="Number of slots: the maximum number of adapters that a replica holds, and that the requests of a step use.",
    )
    unmerged_factor: float = Field(
        1.0,
        ge=1,
        allow_inf_nan=False,
        description="Simulated time of a step whose requests have several adapters, over that of one whose requests all have the same "
        "one or none: its weights are merged for such a step. 1: adapters take no time.",
    )
    switch_s: Seconds = Field(
        0.0,
        description="Simulated time that merging or unmerging weights adds to a step, seconds; only with `unmerged_factor`.",
    )
    models: tuple[AdapterConfig, ...] | None = Field(
        description="Adapters that replicas can load; null: any adapter that a request names, loaded in no time and without memory, as vLLM's scheduler counts them."
    )

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if self.models is None:
            return self
        if not self.models:
            raise ValueError("models is empty; name an adapter, or leave adapters out")
        names = [one.name for one in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two adapters have one name ({', '.join(twice)})")
        return self

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks that all slots occupy; each slot has the size of the largest adapter."""
        return self.max_loras * max((one.num_blocks for one in self.models or ()), default=0)
