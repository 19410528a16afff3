"""``python -m jax_cudnn doctor``: versions of everything, whether they fit, and what to do."""
