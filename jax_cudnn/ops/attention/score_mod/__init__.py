"""score_mod: a function of scores as a value, and as cuDNN's operations."""
