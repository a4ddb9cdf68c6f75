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

    @property
    def reserves_first(self) -> bool:
        """True if a prompt is computed only when blocks of its target are set aside."""
        return self.settings.reserve == "before_prompt"
