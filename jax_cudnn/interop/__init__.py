"""cuDNN's own interfaces for JAX arrays: its Graph wrapper, and graphs built with its frontend."""

from .makers import from_pygraph as from_pygraph
from .makers import graph_cache as graph_cache
from .wrapper import Graph as Graph
