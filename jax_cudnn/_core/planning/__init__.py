"""From a graph to plans: cuDNN's, XLA's part, and what is said about them."""
