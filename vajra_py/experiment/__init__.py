"""How is one configuration, or a grid of them, run, resumed and compared?"""
