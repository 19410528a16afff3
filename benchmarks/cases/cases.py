"""All cases of real models, in the order of the table."""

from . import convs, matmuls, streams
from .case import ModelCase


def cases(tiny: bool = False) -> list[ModelCase]:
    every = [*convs.cases(), *matmuls.cases(), *streams.cases()]
    return [case.small for case in every if case.small] if tiny else every
