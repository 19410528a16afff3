"""Cases and measurements: ``python -m jax_cudnn bench``; and :func:`compare` for one's own."""

from .comparison import Comparison as Comparison
from .comparison import Formulation as Formulation
from .comparison import compare as compare
