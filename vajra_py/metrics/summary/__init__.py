"""Numbers of one run: latencies, rates, fairness, costs, resources, stability, warnings."""
