"""A router in front of model servers: the mechanism decides where each request goes, and other processes compute it."""
