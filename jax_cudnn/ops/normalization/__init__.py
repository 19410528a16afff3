"""Normalizations of rows, channels and batches."""

from . import batch as batch
from . import channels as channels
from . import rows as rows
