"""Rules of one replicaset for moving requests with their KV between replicas."""

from __future__ import annotations

from msgspec import Struct, field

from vajra_py.config.hand_off import HandOffConfig, MigrationConfig
from vajra_py.runtime.movement.links import LinkOptions


class HandOffRules(Struct, frozen=True):
    """Rules for moving requests with their KV from one replica to another; see `HandOffConfig`."""

    settings: HandOffConfig
    links: LinkOptions
    bytes_per_token: int
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    num_parts: int = 1
    """Number of equal parts into which a step is divided; when a part ends, an equal part of the step's KV can be sent.
    Only with `overlap`.
    """

    @property
    def reserves_first(self) -> bool:
        """True if a prompt is computed only after blocks on the target replica are reserved."""
        return self.settings.reserve == "before_prompt"

    @property
    def overlaps(self) -> bool:
        """True if KV is sent while the prompt is still being computed."""
        return self.settings.overlap != "none"
