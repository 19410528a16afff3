"""The operations: one file a cuDNN family, each holding its nodes."""

from . import conv as conv
from . import matmul as matmul
from . import pointwise as pointwise
from . import reduction as reduction
