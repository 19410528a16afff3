"""The operations: one file a cuDNN family, each holding its nodes."""

from . import convolution as convolution
from . import matrix as matrix
from . import pointwise as pointwise
from . import reduction as reduction
