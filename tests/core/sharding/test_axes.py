"""What shards of a graph's tensors compute is what the whole graph computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases

from jax_cudnn._core.graph.promotion import inferred
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.sharding.axes import WHOLE, factors, localized, parts

_JOINED = {"add": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


def run(spec, operands):
    return jax.jit(functools.partial(evaluate, spec))(*operands)


def in_halves(spec, factor, operands):
    """The results of a graph of which each of two shards computes its part."""
    first, rest = parts(spec, [factor])
    local = localized(first, {factor: 2})
    for call in local.calls:  # nodes hold the sizes of shards
        made = inferred(call.node, {port: local.tensor(name) for port, name in call.inputs})
        assert [made[port][0] for port, _ in call.outputs] == [
            local.tensor(name).shape for _, name in call.outputs
        ]
    values, halves = dict(zip(spec.inputs, operands, strict=True)), ([], [])
    for name in first.inputs:
        axis = factor.axis(name)
        cut = [values[name]] * 2 if axis is None else jnp.split(values[name], 2, axis)
        for half, part in zip(halves, cut, strict=True):
            half.append(part)
    for name, *pair in zip(first.outputs, *(run(local, half) for half in halves), strict=True):
        how, axis = dict(factor.partial).get(name), factor.axis(name)
        assert how is None or axis is None
        values[name] = (
            _JOINED[how](*pair) if how else pair[0] if axis is None else jnp.concatenate(pair, axis)
        )
    if rest is not None:
        made = run(rest, [values[name] for name in rest.inputs])
        values.update(zip(rest.outputs, made, strict=True))
    return [values[name] for name in spec.outputs]


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_halves_give_the_whole(case):
    operands = case.operands(jax.random.key(0))
    _, trace = case.function.trace(*operands)
    spec = trace.spec
    named = [operands[i] for i in trace.operands]
    whole = run(spec, named)
    wide = {tensor.dtype for tensor in spec.tensors} <= {"float32", "int32", "bool"}
    for factor in factors(spec):
        if factor.role == WHOLE or factor.size % 2:
            continue
        made = in_halves(spec, factor, named)
        for name, got, want in zip(spec.outputs, made, whole, strict=True):
            got, want = (np.asarray(x, np.float32) for x in (got, want))
            largest = np.max(np.abs(want), initial=0, where=np.isfinite(want)) + 1e-6
            exact = 2e-4 if wide else 2e-2
            np.testing.assert_allclose(
                got, want, exact, exact * largest, err_msg=str((name, factor))
            )
