"""Router in front of model servers: the mechanism selects the server of each request, and the servers compute."""
