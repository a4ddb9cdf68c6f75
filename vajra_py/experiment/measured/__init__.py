"""Compare simulations with measured runs, and calibrate step times on them."""
