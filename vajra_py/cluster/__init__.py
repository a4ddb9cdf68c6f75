"""Runs and engine replicas on a Ray cluster (the extra `ray`)."""
