"""Run by test_second_process.py in processes of their own: one program, lowered or run, and what
that took. Prints JSON."""

import hashlib
import json
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn as jc


@jc.graph
def dense(g, x, w, b):
    """Compiled at run time: the text of its plan differs from build to build."""
    return g.gelu_approx_tanh(g.bias(g.matmul(x, w), b))


@jc.graph
def block(g, x, w, v):
    """Cut in several: two convolutions, and a softmax that cuDNN has no engine for."""
    y = g.relu(g.conv_fprop(x, w, padding=[1, 1])).set_data_type("bfloat16")
    y = g.relu(g.conv_fprop(y, v, padding=[1, 1]))
    e = g.exp(g.sub(y, g.reduction(y, mode="MAX", out_dims=[4, 1, 16, 16])))
    return g.div(e, g.reduction(e, mode="ADD", out_dims=[4, 1, 16, 16]))


def program(x, w, b, image, first, second):
    return dense(x, w, b), block(image, first, second), dense(x * 2, w, b)


SHAPES = [(1, 64, 128), (1, 128, 96), (1, 1, 96), (4, 16, 16, 16), (32, 16, 3, 3), (32, 32, 3, 3)]


class Counted(logging.Handler):
    """Plans built, and plans from the disk, by our debug log."""

    def __init__(self):
        super().__init__()
        self.built = self.known = 0

    def emit(self, record):
        text = record.getMessage()
        self.built += "planned in" in text
        self.known += "from the plan cache" in text


def main(how):
    counted = Counted()
    logger = logging.getLogger("jax_cudnn")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(counted)
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    if how == "lower":
        avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES]
        with jc.target("H200"):
            text = jc.warmup(program, *avals).as_text()
        found = {}
    else:
        keys = jax.random.split(jax.random.key(0), len(SHAPES))
        arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, SHAPES, strict=True)]
        hits.clear()  # of the lines above
        lowered = jax.jit(program).lower(*arrays)
        text = lowered.as_text()
        results = lowered.compile()(*arrays)
        found = {
            "hits": hits.count("/jax/compilation_cache/cache_hits"),
            "misses": hits.count("/jax/compilation_cache/cache_misses"),
            "results": [float(np.abs(np.asarray(y, np.float32)).mean()) for y in results],
        }
    found["text"] = hashlib.sha256(text.encode()).hexdigest()
    found["calls"] = text.count("custom_call @jax_cudnn")
    print(json.dumps({"built": counted.built, "known": counted.known, **found}))


if __name__ == "__main__":
    main(sys.argv[1])
