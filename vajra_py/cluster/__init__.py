"""Execution of runs and engine replicas on a Ray cluster (requires the extra `ray`)."""
