"""Run the scheduling mechanism on predicted step durations."""
