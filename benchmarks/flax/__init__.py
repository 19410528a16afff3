"""Training steps of models in plain Flax NNX, as they are and accelerated."""
