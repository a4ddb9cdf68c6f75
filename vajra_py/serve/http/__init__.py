"""HTTP below the API: connections, limits, keys, errors, access logs, options."""
