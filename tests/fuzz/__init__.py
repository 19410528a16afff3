"""Random graphs, and what must hold for each: ``python -m jax_cudnn fuzz``."""
