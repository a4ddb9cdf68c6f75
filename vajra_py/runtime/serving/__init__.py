"""Drives replicas: what happens in which order, whatever executes the steps."""
