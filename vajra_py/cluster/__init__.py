"""Replicas and sweeps on several machines."""
