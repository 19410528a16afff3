"""How the axes of a graph's tensors may be sharded."""
