"""Elementwise operations."""

from . import activation as activation
from . import activation_backward as activation_backward
from . import arithmetic as arithmetic
from . import elementary as elementary
from . import logical as logical
from . import masks as masks
