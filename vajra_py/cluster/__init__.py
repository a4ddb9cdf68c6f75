"""How do replicas and sweeps spread over several machines?"""
