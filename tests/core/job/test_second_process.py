"""What one process has planned, another takes over: no plan is built, and its program is equal."""

import json

import pytest
from helpers import python

PROGRAM = """if True:
    import hashlib, json, logging
    import jax, jax.numpy as jnp
    import jax_cudnn as jc

    @jc.graph
    def dense(g, x, w, b):  # compiled at run time: the text of its plan differs between builds
        return g.gelu_approx_tanh(g.bias(g.matmul(x, w), b))

    told = []
    logging.Handler.emit = lambda self, record: told.append(record.getMessage())
    logger = logging.getLogger("jax_cudnn")
    logger.addHandler(logging.Handler())
    logger.setLevel(logging.DEBUG)
    jc.configure(plan_cache=FOLDER)
    shapes = (1, 64, 128), (1, 128, 96), (1, 1, 96)
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with jc.target("H200"):
        warm = jc.warmup(lambda x, *more: (dense(x, *more), dense(x * 2, *more)), *avals)
    text = warm.as_text()
    built, known = (sum(w in t for t in told) for w in ("planned in", "read from the cache"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(json.dumps([built, known, text.count("custom_call @jax_cudnn"), digest]))
"""


@pytest.mark.deviceless
@pytest.mark.long
def test_a_second_process_builds_no_plan_and_lowers_the_same_program(tmp_path, monkeypatch):
    found = []
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        done = python(PROGRAM.replace("FOLDER", repr(str(tmp_path))))
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (*first, text), (*second, same) = found
    assert (first, second, text) == ([1, 0, 2], [0, 1, 2], same)
