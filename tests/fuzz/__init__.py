"""Random graphs, and what must hold for each: ``python -m fuzz``."""
