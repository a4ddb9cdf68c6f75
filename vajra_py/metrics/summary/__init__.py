"""Summary of one run: latencies, rates, fairness, costs, resources, stability and warnings."""
