"""Search for the highest rate, or the cheapest replica counts, at which an SLO holds, with intervals over seeds."""
