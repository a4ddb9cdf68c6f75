"""Search for the highest rate that meets conditions, with intervals over seeds."""
