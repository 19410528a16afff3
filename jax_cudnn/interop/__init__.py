"""cuDNN's own interfaces for JAX arrays: its Graph wrapper, and graphs built with its frontend."""

from .cache import graph_cache as graph_cache
from .pygraph import from_pygraph as from_pygraph
from .wrapper import Graph as Graph
