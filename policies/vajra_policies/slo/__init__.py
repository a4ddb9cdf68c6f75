"""Helpers for SLOs: requests that can still meet theirs, and the work that a step may contain."""
