"""Rules of one replicaset by which requests go from replica to replica with their KV."""

from __future__ import annotations

from dataclasses import dataclass, field

from vajra_py.config.hand_off import HandOffConfig, MigrationConfig
from vajra_py.runtime.movement.links import LinkOptions


@dataclass(frozen=True, slots=True)
class HandOffRules:
    """Rules by which requests go from one replica to another with their KV; see `HandOffConfig`."""

    settings: HandOffConfig
    links: LinkOptions
    bytes_per_token: int
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    num_parts: int = 1
    """Equal parts of a step, at the end of each of which an equal part of its KV can be sent; with `overlap` only."""

    @property
    def reserves_first(self) -> bool:
        """True if a prompt is computed only when blocks of its target are set aside."""
        return self.settings.reserve == "before_prompt"

    @property
    def overlaps(self) -> bool:
        """True if KV is sent while its prompt is computed."""
        return self.settings.overlap != "none"
