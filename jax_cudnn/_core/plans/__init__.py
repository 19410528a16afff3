"""Planning: from a graph to cuDNN plans and XLA parts, and their explanation."""
