"""Atlas of policies: any set of them side by side on several workloads and loads."""
