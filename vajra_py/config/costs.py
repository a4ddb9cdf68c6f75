"""Schema of `costs:`: prices and power of the devices that an experiment runs on."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Amount = Annotated[float, Field(strict=True, ge=0)]
_Positive = Annotated[float, Field(strict=True, gt=0)]
_Text = Annotated[str, Field(strict=True, min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class DeviceCostsConfig(_Section):
    """Figures for one kind of device; missing figures come from the description of the device."""

    price_per_hour: _Amount | None = Field(None, description="Price of one device for an hour, US dollars.")
    idle_w: _Amount | None = Field(None, description="Power of an idle device, watts.")
    decode_w: _Amount | None = Field(None, description="Power in a step that decodes one sequence, watts.")
    prefill_w: _Amount | None = Field(
        None, description="Power in a step of at least `saturating_tokens` tokens, watts; in between, linear."
    )
    saturating_tokens: _Positive | None = Field(
        None, description="Number of tokens in a step above which power no longer rises."
    )
    source: _Text = Field("the experiment's file", description="Source and date of the figures.")

    @property
    def given(self) -> dict[str, float]:
        """Figures that the file sets, by field name."""
        return self.model_dump(exclude={"source"}, exclude_none=True)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        watts = [value for value in (self.idle_w, self.decode_w, self.prefill_w) if value is not None]
        if watts != sorted(watts):
            raise ValueError(f"power must not decrease from idle_w to decode_w to prefill_w (got {watts})")
        return self


class CostsConfig(_Section):
    """Prices and power of the devices, for cost and energy."""

    device: _Text | None = Field(None, description="Device of replicas whose backend or latency model names none.")
    devices_per_replica: Annotated[int, Field(strict=True, gt=0)] | None = Field(
        None, description="Number of devices of such a replica; null: one."
    )
    devices: dict[str, DeviceCostsConfig] = Field(
        default_factory=dict, description="Figures by device name, which replace those of the device's description."
    )
