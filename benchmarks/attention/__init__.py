"""Attention beside jax.nn, XLA's formulations and torch: forward and backward apart."""
