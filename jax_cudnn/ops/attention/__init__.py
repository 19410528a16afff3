"""Attention: dense, packed, paged, and in fp8."""

from . import fp8 as fp8
from . import mxfp8 as mxfp8
from . import nodes as nodes
