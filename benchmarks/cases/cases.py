"""All cases of real models, in the order of the table."""

from . import convs, matmuls, streams
from .case import ModelCase


def cases(tiny: bool = False) -> list[ModelCase]:
    return [make(tiny) for module in (convs, matmuls, streams) for make in module.cases()]
