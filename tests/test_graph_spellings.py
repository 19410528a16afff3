"""cuDNN's words for attention in a wrapped graph: masks that contradict each other are errors."""

import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc

Q, K = jnp.ones((1, 2, 4, 8)), jnp.cos(jnp.arange(128.0)).reshape(1, 2, 8, 8)
CONTRADICTIONS = [
    {"use_causal_mask": True, "use_causal_mask_bottom_right": True},
    {"use_causal_mask": True, "diagonal_band_right_bound": 2},
    {"use_causal_mask": True, "diagonal_alignment": "BOTTOM_RIGHT"},
    {"sliding_window_length": 2, "diagonal_band_left_bound": 3},
]
SAME = [
    (
        {"use_causal_mask": True, "diagonal_band_right_bound": 0},
        {"diagonal_band_right_bound": 0},
    ),
    (
        {"use_causal_mask_bottom_right": True, "diagonal_alignment": "TOP_LEFT"},
        {"diagonal_band_right_bound": 0, "diagonal_alignment": "BOTTOM_RIGHT"},
    ),
    (
        {"use_causal_mask": True, "sliding_window_length": 3},
        {"diagonal_band_left_bound": 3, "diagonal_band_right_bound": 0},
    ),
]


def attention(**words):
    with jc.Graph(inputs=["a::q", "a::k", "a::v"], outputs=["a::O"]) as graph:
        graph.sdpa(Q, K, jnp.sin(K), **words, name="a")
    return graph(Q, K, jnp.sin(K))


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_words_that_contradict_each_other_are_refused(words):
    with pytest.raises(jc.GraphError, match="contradict each other") as caught:
        attention(**words)
    assert all(word in str(caught.value) for word in words)
    assert "test_graph_spellings.py" in str(caught.value)


@pytest.mark.parametrize(("words", "bounds"), SAME)
def test_words_of_masks_are_bounds(words, bounds):
    found = attention(**words)
    np.testing.assert_array_equal(found, attention(**bounds))
    assert not np.allclose(found, attention())
