"""Convolutions."""

from . import backward as backward
from . import forward as forward
