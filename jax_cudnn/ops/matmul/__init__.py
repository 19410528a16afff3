"""Matrix products."""

from . import nodes as nodes
