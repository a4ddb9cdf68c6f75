"""Retention policies: which idle cached content is overwritten first."""

from __future__ import annotations
