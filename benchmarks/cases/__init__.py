"""Cases of real models: each graph with its shapes, and XLA's formulations of it."""
