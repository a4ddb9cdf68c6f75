"""Fair shares between tenants, counted in tokens."""
