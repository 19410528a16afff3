"""From a jitted function to its program: when it is planned, for which GPU, and how often."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import DisabledSafetyCheck

import jax_cudnn as jc
from jax_cudnn._core import context, cuda
from jax_cudnn._core.planning import planner
from jax_cudnn._core.planning.deviceless import profiles
from jax_cudnn._core.planning.execution_plan import ExecutionPlan

H200, H100 = map(profiles.get, ("H200", "H100"))
X = jax.ShapeDtypeStruct((1, 64, 64), jnp.bfloat16)
CALL = "stablehlo.custom_call @jax_cudnn("
ALLOW = [DisabledSafetyCheck.custom_call("jax_cudnn")]


@jc.graph
def linear(g, x, w):
    return g.relu(g.matmul(x, w))


@pytest.fixture(autouse=True)
def no_programs(no_plans):
    """Programs hold plans, too."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def builds(made_up_plans, monkeypatch):
    """Planning replaced by a stand-in without cuDNN; the list of what was planned."""
    made = []

    def build(spec, site):
        made.append((spec, site))
        return ExecutionPlan(
            "{}", "eng0", 91900, site.device_name, 256, 0, ((1, 0, 0, 0),), (), b"", 1
        )

    monkeypatch.setattr(planner, "_build", build)
    return made


def lower(f, *args, target="H200", platforms=("cuda",)):
    with jc.target(target):
        return jax.jit(f).trace(*args).lower(lowering_platforms=platforms).as_text()


def test_nothing_is_planned_before_lowering(builds):
    with jc.target("H200"):
        jax.eval_shape(linear, X, X)
        jax.make_jaxpr(jax.grad(lambda x, w: linear(x, w).sum().astype(float)))(X, X)
        traced = jax.jit(linear).trace(X, X)
        assert builds == []
        traced.lower(lowering_platforms=("cuda",))
    assert len(builds) == 1


def test_other_platforms_get_the_reference_and_no_plan(builds):
    for platform in ("cpu", "tpu", "rocm"):
        text = lower(linear, X, X, platforms=(platform,))
        assert "custom_call @jax_cudnn" not in text
        assert "dot_general" in text
    assert builds == []


def test_two_targets_on_one_jitted_function_give_two_programs(builds):
    jitted, texts = jax.jit(linear), []
    for target in ("H200", H100, "H200", "nvidia h200"):
        with jc.target(target):
            texts.append(jitted.trace(X, X).lower(lowering_platforms=("cuda",)).as_text())
    assert 'device_name = "NVIDIA H200"' in texts[0]
    assert 'device_name = "NVIDIA H100' in texts[1]
    assert texts[2] == texts[3] == texts[0]
    assert [site for _, site in builds] == [H200, H100]


def test_no_device_and_no_target_is_said_in_words(builds):
    with pytest.raises(jc.TargetError, match="linear: the GPU to plan for is not known") as caught:
        lower(linear, X, X, target=None)
    words = ("jax_cudnn.target", 'gpus=["H200"]', *profiles.names())
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(jc.TargetError, match="H200"):
        jc.target("H2OO")


def test_symbolic_dimensions_are_refused_for_cuda_and_work_on_cpu(key):
    batch = jax.export.symbolic_shape("batch")[0]
    operands = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((batch, 4, 8), (1, 8, 2))]
    with pytest.raises(jc.GraphError, match="symbolic dimensions") as caught, jc.target("H200"):
        jax.export.export(jax.jit(linear), platforms=("cuda",), disabled_checks=ALLOW)(*operands)
    assert "float32[batch,4,8]" in str(caught.value)
    exported = jax.export.export(jax.jit(linear), platforms=("cpu",))(*operands)
    x, w = jax.random.normal(key, (3, 4, 8)), jax.random.normal(key, (1, 8, 2))
    np.testing.assert_allclose(exported.call(x, w), jax.nn.relu(x @ w), rtol=1e-4, atol=1e-5)


def test_export_for_both_platforms_runs_here(builds, key):
    with jc.target("H200"):
        both = {"platforms": ("cuda", "cpu"), "disabled_checks": ALLOW}
        exported = jax.export.export(jax.jit(linear), **both)(X, X)
    assert exported.mlir_module().count(CALL) == 1
    x, w = jax.random.normal(key, (2, *X.shape), X.dtype)
    np.testing.assert_array_equal(exported.call(x, w), jax.jit(linear)(x, w))


def device(kind="NVIDIA H200", process=0, ordinal=0, platform="gpu", version="cuda 12090"):
    """A device of a compilation, as far as the choice looks at it."""
    return types.SimpleNamespace(
        device_kind=kind,
        process_index=process,
        local_hardware_id=ordinal,
        platform=platform,
        client=types.SimpleNamespace(platform_version=f"PJRT C API\n{version}"),
    )


ROCM, CPU = device("MI300", version="rocm 60000"), device("cpu", platform="cpu")


def test_plans_on_a_local_gpu_of_the_compilation_or_for_a_target():
    for devices, ordinal in (
        ([device(ordinal=5), device(ordinal=2)], 5),
        ([device(process=1, ordinal=7), device(ordinal=4)], 4),
        ([CPU, device(ordinal=1)], 1),
    ):
        assert context.site(devices, "f") == cuda.CudaDevice(ordinal)
    for devices, words in (
        ([device("NVIDIA H200"), device("NVIDIA H100")], "NVIDIA H100, NVIDIA H200"),
        ([device(process=1)], "belongs to this process"),
        ([CPU], "the GPU to plan for is not known"),
        ([ROCM], "the GPU to plan for is not known"),
    ):
        with pytest.raises(jc.TargetError, match=f"(?s)^f:.*{words}"):
            context.site(devices, "f")
        with jc.target(H100):
            assert context.site(devices, "f") is H100
