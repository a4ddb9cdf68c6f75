"""Driving of replicas: events are handled in the same order for every backend that executes the steps."""
