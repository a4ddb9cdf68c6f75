"""Run, resume and compare one configuration or a grid of them."""
