"""Finds the fused operation of a running program that is inaccurate, or makes the first NaN."""
