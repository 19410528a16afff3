"""Looks into a program while it runs: which fused operation is off, or makes the first NaN."""
