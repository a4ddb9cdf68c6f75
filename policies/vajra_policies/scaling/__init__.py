"""Scalers: how many replicas each pool should have."""

from __future__ import annotations
