"""Order by cached prefixes: who has the most in the cache, or the least left to compute."""
