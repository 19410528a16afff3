"""Run by test_second_process.py in processes of their own: one program, lowered, and what that
took. Prints JSON."""

import hashlib
import json
import logging

import jax
import jax.numpy as jnp

import jax_cudnn as jc


@jc.graph
def dense(g, x, w, b):
    """Compiled at run time: the text of its plan differs from build to build."""
    return g.gelu_approx_tanh(g.bias(g.matmul(x, w), b))


def program(x, w, b):
    return dense(x, w, b), dense(x * 2, w, b)


CALL = "custom_call @jax_cudnn"


class Counted(logging.Handler):
    """Plans built, and plans from the disk, by our debug log."""

    def __init__(self):
        super().__init__()
        self.built = self.known = 0

    def emit(self, record):
        text = record.getMessage()
        self.built += "planned in" in text
        self.known += "from the plan cache" in text


def main():
    counted = Counted()
    logger = logging.getLogger("jax_cudnn")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(counted)
    shapes = [(1, 64, 128), (1, 128, 96), (1, 1, 96)]
    with jc.target("H200"):
        text = jc.warmup(
            program, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
        ).as_text()
    found = {"text": hashlib.sha256(text.encode()).hexdigest(), "calls": text.count(CALL)}
    print(json.dumps({"built": counted.built, "known": counted.known, **found}))


if __name__ == "__main__":
    main()
