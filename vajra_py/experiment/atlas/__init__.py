"""Atlas of policies: comparison of a set of policies on several workloads and loads."""
