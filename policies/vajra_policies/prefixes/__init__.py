"""Order by cached prefixes: the request with the longest prefix hit first, or with the least left to compute."""
