"""How does an HTTP client talk to the engine?"""
