"""Driving of replicas: the order of events, whatever executes the steps."""
