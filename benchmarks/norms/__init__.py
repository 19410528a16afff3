"""Normalizations beside XLA's formulations and torch: forward and backward apart."""
