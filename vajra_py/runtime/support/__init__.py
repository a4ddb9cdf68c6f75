"""Clock, named random streams, garbage-collection control."""
