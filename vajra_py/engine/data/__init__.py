"""Text and templates shipped with the engine."""
