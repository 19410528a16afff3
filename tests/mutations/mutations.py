# ruff: noqa: E501
# fmt: off
"""Mutations of the package: small defects that the test suite must find (``run.py``).

Each row is a file of ``jax_cudnn``, text that stands in it exactly once, and what takes its place.
"""

ATTENTION = "ops/attention_reference.py"
MUTATIONS = {
    # attention
    "window off by one": (ATTENTION, "seen &= j > at - self.left", "seen &= j >= at - self.left"),
    "causal off by one": (ATTENTION, "(j <= at + self.right)", "(j < at + self.right)"),
    "bottom_right forgotten": (ATTENTION, "i + more_keys if self", "i if self"),
    "gradient of scores has the wrong sign": (ATTENTION, "(along - mean)", "(along + mean)"),
    "values' gradient without dropout": (ATTENTION, "weights * keep\n            slope", "weights\n            slope"),
    "statistic without its maximum": (ATTENTION, "largest + jnp.log(total)", "jnp.log(total)"),
    "sink not in the sum": (ATTENTION, "total + jnp.exp(sink - largest)", "total"),
    "blocks of rows without their position": (ATTENTION, "function({**shared, **own}, first)", "function({**shared, **own}, 0 * first)"),
    "bias's gradient not summed over heads": (ATTENTION, "[1, 2] * (shape[1] == 1)", "[2] * (shape[1] == 1)"),
    "rows that see no key have mean of all": ("ops/attention_hidden.py", "        count = keys\n", ""),
    "shared bias shown with a full stride": ("ops/attention_bias.py", "strides[_QUERIES] = 0", "strides[_QUERIES] = strides[_KEYS]"),
    "packed offsets may leave the array": ("ops/attention_packed.py", "jnp.clip(found[offset] // size, 0, tokens)", "(found[offset] // size)"),
    "one page too many": ("ops/attention_paged.py", "0, k[0] - 1)", "0, k[0])"),
    "buckets double": ("ops/bucketing.py", "step * math.ceil(", "2 * step * math.ceil("),
    "score_mod's operands swapped with the lengths": ("ops/score_mod_written.py", "[everything[i] for i in read]", "[everything[i] for i in reversed(read)]"),
    # normalizations
    "norm's mean not taken out of the tangent": ("ops/normalization_tangent.py", "dx - found[\"mean\"] if extent.centred", "dx if extent.centred"),
    "inv_var's tangent has the wrong sign": ("ops/normalization_tangent.py", "-jnp.square(inv_var) * slope", "jnp.square(inv_var) * slope"),
    "running variance is biased": ("ops/batch_normalization.py", "variance * (count / max_dim(count - 1, 1))", "variance"),
    "momentum the other way": ("ops/batch_normalization.py", "in_running_mean + momentum * (mean", "mean - momentum * (mean"),
    "norm forgets its bias": ("ops/normalization_base.py", "y if bias is None else y + bias", "y"),
    "epsilon outside of the root": ("ops/normalization_base.py", "jax.lax.rsqrt(variance + epsilon)", "(jax.lax.rsqrt(variance) + epsilon)"),
    # convolutions, products, pointwise
    "dilation not in the window": ("ops/convolution_base.py", "window = dilation[axis] * (r[axis] - 1) + 1", "window = r[axis]"),
    "groups take the weights' channels": ("ops/convolution_base.py", "if not i or not c or c % i or k % (c // i):", "if not i or not c or c % i:"),
    "gradient by the other operand": ("ops/convolution_base.py", "if here != port\n        }\n        return {port: g.apply(kind(**own, **dims), **given)[0]}", "if here != port\n        }\n        return {port: g.apply(kind(**own, **dims), **given)[0] * 2.0}"),
    "matmul's transposes swapped": ("ops/fused_matmul.py", "return (columns, rows) if transposed else (rows, columns)", "return (rows, columns)"),
    "a scale folded into the weight is lost": ("ops/convolution.py", "product.astype(weight.dtype)}", "weight}"),
    "a product before a move is written wide": ("_core/graph/xla_form.py", "smooth = node.smooth or node.moves", "smooth = node.smooth"),
    "a product reads a result as wide bits": ("_core/graph/xla_form.py", "if node.product:  # of", "if False:  # of"),
    "a NaN is explained by rounding": ("_core/agreement.py", "exact and math.isfinite(found.worst)", "exact"),
    "a program's graphs are planned one by one": ("_core/auto.py", "if len(graphs) > 1:", "if False:"),
    "mean is a sum in reverse": ("ops/reduction.py", "math.prod(out.shape) / max(math.prod(shape), 1)", "1.0"),
    "softplus_backward of the wrong sign": ("ops/activation_backward.py", "return loss * jax.nn.sigmoid(input)", "return loss * jax.nn.sigmoid(-input)"),
    "tan's slope": ("ops/elementary.py", "OUT_0 * OUT_0 + 1.0", "OUT_0 * OUT_0 - 1.0"),
    "slices of the wrong strides": ("ops/slicing.py", "[s * part.step for s, part", "[s for s, part"),
    "result of a convolution in the wrong order": ("ops/fused_conv.py", "    y = transpose(y, np.argsort(spec.out_spec))\n    return y.squeeze", "    y = transpose(y, spec.out_spec)\n    return y.squeeze"),
    # graphs
    "float8 overflows": ("_core/graph/reference.py", "return jnp.clip(value, -largest, largest).astype(target)", "return value.astype(target)"),
    "integers are cut, not rounded": ("_core/graph/reference.py", "value = jnp.round(value)", "value = jnp.trunc(value)"),
    "what is kept is not rounded": ("_core/graph/reference.py", "rounded(kept(result, dtype) if is_read else result, dtype)", "result.astype(dtype) if not is_read else result"),
    "bounds of one port only": ("_core/graph/bounds.py", "jnp.minimum(found[name], x) if name in found else x", "x"),
    "ties of several uses not seen": ("_core/graph/wire.py", "if tensors[port].name in {*spec.inputs, *spec.outputs} - others:", "if tensors[port].name in {*spec.inputs, *spec.outputs}:"),
    "batches that lie apart are merged": ("_core/graph/layout.py", "if order[first : first + len(own)] != own:", "if False:"),
    # transformations
    "tangent is not rounded": ("_core/transforms/linearize.py", "g.rounded(x, tensor.dtype) if exact else x", "x"),
    "residuals in float32": ("_core/transforms/linearize.py", "                dtypes[name] = natural", "                pass"),
    "one cotangent is lost": ("_core/transforms/transpose.py", "terms.setdefault(name, []).append(passed[port])", "terms[name] = [passed[port]]"),
    "vmap moves the wrong axis": ("_core/transforms/batch.py", "(at, *(i for i in range(split.ndim) if i != at))", "tuple(range(split.ndim))"),
    "residuals: everything is cheap": ("_core/transforms/residuals.py", "if call.node.anchor:\n            found |= reads & computed", "if False:\n            found |= reads & computed"),
    # planning
    "key without the device": ("_core/planning/planner.py", 'key_text("plan", spec, known_as)', 'key_text("plan", spec, "")'),
    "memo without the device": ("_core/planning/planner.py", "_plans.get((key, identity(site)), lambda", "_plans.get((key, \"\"), lambda"),
    "split's key without the options": ("_core/planning/placement.py", "known_losses, asked)", "known_losses)"),
    "losses on other GPUs": ("_core/planning/losses.py", "measured = table().get(str(sm_version))\n    if measured is None:\n        return None\n    filed", "measured = table().get(\"90\")\n    if measured is None:\n        return None\n    filed"),
    "nondeterministic engines": ("_core/planning/choice.py", "notes.append(\"NONDETERMINISTIC\")", "pass"),
    "broadcasts read out of bounds": ("_core/planning/limits.py", "wrong = [list(dims) for dims in arrays if dims != out and list(dims) not in allowed]", "wrong = []"),
    "a cut loses an output": ("_core/planning/split.py", "wanted = {*spec.outputs, *(name for call in outside for _, name in call.inputs)}", "wanted = {*spec.outputs}"),
    "constants in the wrong byte order": ("_core/planning/execution_plan.py", "bytes.fromhex(value)[::-1]", "bytes.fromhex(value)"),
    "views at the wrong offset": ("_core/planning/execution_plan.py", ".offset * itemsize(tensor.dtype)", ".offset"),
    "arrays of a stored plan by value": ("_core/planning/stored.py", "CONSTANT) == tensor[\"isByValue\"]", "CONSTANT) in (True, False)"),
    "workspace of a stored plan not aligned": ("_core/planning/stored.py", " and offset % SCALAR_STRIDE == 0", ""),
    "dimensions of a stored plan not compared": ("_core/planning/stored.py", "found == shown.get(uid, found)", "True"),
    "too little memory is the graph's fault": ("_core/planning/failure.py", "_LACKING.search(text) or ", ""),
    "a failure is not tried twice": ("_core/planning/failure.py", "return attempt(fresh=True)", "raise first"),
    # store, job, custom call
    "damaged entries are believed": ("_core/store/entry.py", "if checksum(body) != header[2]:", "if False:"),
    "an import keeps what is unusable": ("_core/store/archive.py", "_check(Content(key, value, \"\"))", "pass"),
    "the newest entries are deleted": ("_core/store/cache.py", "in sorted(entries):", "in sorted(entries, reverse=True):"),
    "a failed attempt is repeated endlessly": ("_core/job/agreement.py", "            answer.attempt += 1\n            self._put(", "            self._put("),
    "results read in the wrong dtype": ("_core/ffi.py", "return x.astype(tensor.dtype)", "return x"),
    # interop and Flax
    "results of late changes keep their dtype": ("interop/inferring.py", "if name in self._typed:", "if name not in self._typed:"),
    "packed tokens turned the wrong way": ("interop/tokens.py", "pairs = [(turn, name, apart.name)]", "pairs = [(vocabulary().reshape(apart.shape), name, apart.name)]"),
    "accelerate forgets containers": ("flax/accelerate.py", "made[key] = self.of(inner, (*path, str(key)))", "made[key] = inner"),
    "running statistics swapped": ("flax/normalization.py", "layer.mean[...], layer.var[...] = jax", "layer.var[...], layer.mean[...] = jax"),
    "einsum's batch axes are summed": ("flax/linear.py", "[c for c in both if c in result]", "[]"),
    # the executor
    "C++: an operand too few": ("csrc/plan.cc", "std::max<size_t>(operands_needed_, binding.value + 1)", "std::max<size_t>(operands_needed_, binding.value)"),
    "C++: a view beyond its source": ("csrc/plan.cc", "if (binding.bytes >= sizes[binding.value]) {", "if (binding.bytes >= sizes[binding.value] + 4096) {"),
    "C++: the version is not compared": ("csrc/plan.cc", "cudnn.version != attributes_.cudnn_version", "cudnn.version < 0"),
    "C++: the checksum is not compared": ("csrc/plan.cc", "a.checksum != Checksum(a)", "a.checksum < 0"),
    "C++: the workspace is not compared": ("csrc/plan.cc", "(*plan)->workspace_bytes() > given", "given < 0"),
    "C++: tensors are an element smaller": ("csrc/plan_text.cc", "(last + 1) * type.bits / 8", "last * type.bits / 8"),
    "C++: packs of equal hash are equal": ("csrc/variant_pack.cc", "if (cache_.Equal(*pack, pointers)) {", "if (true) {"),
}
