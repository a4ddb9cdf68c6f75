"""Scalers: policies that set the number of replicas of each pool."""

from __future__ import annotations
