"""Run by test_second_process.py in processes of their own: one program, lowered or run, and what
that took. Prints JSON."""

import hashlib
import json
import logging
import sys

import jax
import jax.numpy as jnp

import jax_cudnn as jc


@jc.graph
def dense(g, x, w, b):
    """Compiled at run time: the text of its plan differs from build to build."""
    return g.gelu_approx_tanh(g.bias(g.matmul(x, w), b))


def program(x, w, b):
    return dense(x, w, b), dense(x * 2, w, b)


NAMES = ("hits", "misses")
SHAPES = [(1, 64, 128), (1, 128, 96), (1, 1, 96)]


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
            text, found = jc.warmup(program, *avals).as_text(), {}
    else:
        keys = jax.random.split(jax.random.key(0), len(SHAPES))
        arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, SHAPES, strict=True)]
        hits.clear()  # of the lines above
        lowered = jax.jit(program).lower(*arrays)
        text = lowered.as_text()
        results = lowered.compile()(*arrays)
        found = {name: hits.count(f"/jax/compilation_cache/cache_{name}") for name in NAMES}
        found["results"] = [float(jnp.abs(y.astype("float32")).mean()) for y in results]
    found["text"] = hashlib.sha256(text.encode()).hexdigest()
    found["calls"] = text.count("custom_call @jax_cudnn")
    print(json.dumps({"built": counted.built, "known": counted.known, **found}))


if __name__ == "__main__":
    main(sys.argv[1])
