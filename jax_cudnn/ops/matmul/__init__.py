"""Matrix products."""

from . import grouped as grouped
from . import nodes as nodes
