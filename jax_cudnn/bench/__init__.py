"""Cases and measurements: ``python -m jax_cudnn bench``."""
