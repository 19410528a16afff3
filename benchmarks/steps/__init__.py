"""Training steps: whole programs with their gradients, beside plain JAX."""
