"""Golden plans: what is stable of each case's plans and derivatives, one file per set of versions.

    cd tests && python -m golden.golden            # compares with the file of these versions
    cd tests && python -m golden.golden --write    # writes it

For every case of the registry, by GPU: the segments of the graph as the default implementation
runs it and as ``implementation="cudnn"`` does (operations, cuDNN's engine with its knobs and a
digest of its bindings, or XLA with the kind of its reason), the custom calls (types and memory
layouts), and what XLA does around them (operations by number). Independent of the GPU: the
equations of each case's gradient, jvp and vmap.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
from cases import all_cases, dtype_cases

import jax_cudnn as jc
from jax_cudnn._core import compat, cuda_graphs
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.planning import frontend, losses, stored
from jax_cudnn._core.planning.deviceless import client, profiles
from jax_cudnn._core.planning.limits import known_reasons

GPUS = ("A100", "H100", "H200", "B200")
FOLDER = Path(__file__).parent


def cases():
    """All of them by name."""
    return {case.name: case for case in (*all_cases(), *dtype_cases())}


def versions():
    """What a golden file is of."""
    planning = client.call(f"{frontend.__name__}:identity")
    return {
        "jax": version("jax"),
        "cuDNN": planning["cuDNN"],
        "nvidia-cudnn-frontend": planning["nvidia-cudnn-frontend"],
    }


def file_of(installed):
    """The golden file of these versions, or None."""
    for path in sorted(FOLDER.glob("*.json")):
        if json.loads(path.read_text())["versions"] == installed:
            return path
    return None


# -- plans -----------------------------------------------------------------------------------------


def plans(case, gpu):
    """Implementation -> lines about a case's plan for a GPU; "cudnn" only where it differs."""
    split = _lines(case.function, case.avals, gpu)
    strict = _lines(case.function.with_options(implementation="cudnn"), case.avals, gpu)
    return {"split": split} if strict == split else {"split": split, "cudnn": strict}


def _lines(function, avals, gpu):
    with jc.target(gpu):
        try:
            plan = jc.plan(function, *avals)
        except jc.UnsupportedGraphError:
            spec = function.trace(*avals)[1].spec
            return [f"refused: {_kind(spec, gpu)}"]
        lines = [_segment(segment, gpu) for segment in plan.segments]
        if plan.execution_plans:
            traced = jax.jit(function).trace(*avals)
            lowered = traced.lower(lowering_platforms=("cuda",))
            lines += _program(lowered.compiler_ir("stablehlo"))
    return lines


def _segment(segment, gpu):
    operations = " ".join(call.name for call in segment.spec.calls)
    if segment.plan is None:
        return f"XLA, {_kind(segment.spec, gpu)}: {operations}"
    made = segment.plan
    stored.plan_of(
        made.to_json(), boundary(segment.spec.for_planning).planned
    )  # the cache takes it
    cuda_graphs._call_site(made, "golden")  # and the executor
    told = repr((made.bindings, made.fills, made.tables, made.scalars)).encode()
    digest = hashlib.sha256(told).hexdigest()[:8]
    return f"cuDNN {made.engine}, bindings {digest}: {operations}"


def _kind(spec, gpu):
    """The kind of reason for which a graph, or a part of one, is not cuDNN's."""
    site = profiles.get(gpu)
    if any(call.node.xla_only for call in spec.calls):
        return "XLA only"
    if losses.loss(spec, site.sm_version):
        return "measured loss"
    if known_reasons(boundary(spec.for_planning).planned):
        return "known limit"
    return "no engine" if any(call.node.anchor for call in spec.calls) else "fused by XLA"


def _program(module):
    """The custom calls of a lowered program, and the operations around them by number."""
    calls, others = [], collections.Counter()
    for op in _operations(module.operation):
        name = op.name.removeprefix("stablehlo.")
        if name == "custom_call" and "jax_cudnn" in str(op.attributes["call_target_name"]):
            given = _types(op.operands, op.attributes["operand_layouts"])
            made = _types(op.results, op.attributes["result_layouts"])
            calls.append(f"call {given} -> {made}")
        elif name not in ("module", "func.func", "func.return", "return", "builtin.module"):
            others[name] += 1
    around = " ".join(f"{name}*{count}" for name, count in sorted(others.items()))
    return [*calls, f"around: {around}"]


def _operations(op):
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _types(values, layouts):
    found = []
    for value, layout in zip(values, layouts, strict=True):
        order = "".join(str(layout)[len("dense<") :].partition(">")[0].strip("[]").split(", "))
        found.append(f"{str(value.type)[len('tensor<') : -1]}{{{order}}}")
    return " ".join(found)


# -- derivatives and batches -----------------------------------------------------------------------


def jaxprs(case):
    """Transformation -> the equations of a case's transformed function, one after the other."""
    function, avals = case.function, case.avals
    moving = [i for i, a in enumerate(avals) if _is_real(a)]

    def floats(*values):
        given = list(avals)
        for i, value in zip(moving, values, strict=True):
            given[i] = value
        arrays = [
            jnp.zeros(a.shape, a.dtype) if isinstance(a, jax.ShapeDtypeStruct) else a for a in given
        ]
        return [y for y in jax.tree.leaves(function(*arrays)) if _is_real(y)]

    at = [avals[i] for i in moving]
    stacks = [jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in avals]
    found = {"vmap": _equations(jax.vmap(function), *stacks)}
    if moving and jax.eval_shape(floats, *at):
        found["jvp"] = _equations(lambda *x: jax.jvp(floats, x, x), *at)
        found["vjp"] = _equations(lambda *x: _gradient(floats, x), *at)
    return found


def _gradient(function, at):
    results, pull = jax.vjp(function, *at)
    return pull([jnp.ones_like(y) for y in results])


def _is_real(aval):
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype != jnp.float8_e8m0fnu


def _equations(function, *avals):
    try:
        jaxpr = compat.live_program(jax.make_jaxpr(function)(*avals))[0]
    except jc.JaxCudnnError as error:
        return f"refused: {type(error).__name__}"
    names = [_name(equation) for equation in _flat(jaxpr)]
    runs = [(name, len([*same])) for name, same in itertools.groupby(names)]
    return ", ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def _name(equation):
    spec = equation.params.get("spec")
    if spec is None:
        return equation.primitive.name
    return f"{equation.primitive.name}[{' '.join(call.node.method for call in spec.calls)}]"


def _flat(jaxpr):
    """All equations, those of inner jaxprs in the place of what holds them."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        values = jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr)
        inner = [value for value in values if _is_jaxpr(value)]
        if inner and "spec" not in equation.params:
            for value in inner:
                yield from _flat(value)
        else:
            yield equation


def _is_jaxpr(value):
    return hasattr(getattr(value, "jaxpr", value), "eqns")


# -- the file --------------------------------------------------------------------------------------


def written(installed):
    """All of it, as the text of a file; GPUs with the same plans share an entry."""
    content = {}
    for name, case in cases().items():
        groups = {}
        for gpu in GPUS:
            groups.setdefault(json.dumps(plans(case, gpu)), []).append(gpu)
        by_gpu = {" ".join(gpus): json.loads(found) for found, gpus in groups.items()}
        content[name] = {"plans": by_gpu, "jaxprs": jaxprs(case)}
        print(name, *map(" ".join, groups.values()), sep=", ", file=sys.stderr)
    return json.dumps({"versions": installed, "cases": content}, indent=0) + "\n"


def golden_plans(content, gpu):
    """Case -> what the file has of a GPU."""
    return {
        name: next((p for gpus, p in case["plans"].items() if gpu in gpus.split()), None)
        for name, case in content["cases"].items()
    }


def differences(got, want):
    """Lines that say what differs, by case."""
    found = []
    for name in sorted({*got, *want}):
        ours, theirs = (_flat_lines(x.get(name)) for x in (got, want))
        if ours != theirs:
            found.append(name)
            found += [f"  - {line}" for line in theirs if line not in ours]
            found += [f"  + {line}" for line in ours if line not in theirs]
    return found


def _flat_lines(entry):
    lines = []
    for kind, content in (entry or {}).items():
        lines += [f"{kind}: {x}" for x in (content if isinstance(content, list) else [content])]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="newest.json or oldest.json")
    options = parser.parse_args()
    installed = versions()
    text = written(installed)
    if options.write:
        options.write.write_text(text)
        return 0
    path = file_of(installed)
    if path is None:
        print(f"no golden file of {installed}")
        return 1
    got, want = json.loads(text), json.loads(path.read_text())
    lines = differences(*({n: c["jaxprs"] for n, c in x["cases"].items()} for x in (got, want)))
    for gpu in GPUS:
        found = differences(golden_plans(got, gpu), golden_plans(want, gpu))
        lines += [f"{gpu}: {line}" for line in found]
    print("\n".join(lines) or "equal")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
