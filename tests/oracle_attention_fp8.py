"""What attention in fp8 means, in NumPy float64, without its roundings inside."""

import numpy as np
import oracle_attention

from jax_cudnn.ops.attention import Sdpa, SdpaBackward

# What one number may lose as fp8, relative: half a unit of three digits after the point, or two.
HALF_UNIT = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}


def second_product(spec):
    """What weights and their gradients lose as fp8 there: half a unit, which a largest value may
    well have lost whole; in the backward twice that, as its differences cancel."""
    return max(
        (
            HALF_UNIT[spec.tensor(dict(call.inputs)["q"]).dtype] * (1 + (method in _DIFFERENCES))
            for call in spec.calls
            if (method := call.node.method) in OPERATIONS
        ),
        default=0.0,
    )


_DIFFERENCES = {"sdpa_fp8_backward"}


def _plain(node, kind, **more):
    left, right = (getattr(node, bound) for bound in node.bounds)
    return kind(
        attn_scale=node.attn_scale,
        diagonal_alignment=node.diagonal_alignment,
        diagonal_band_left_bound=left,
        diagonal_band_right_bound=right,
        **more,
    )


def _weights(node, q, k, stats, **lengths):
    scores = oracle_attention._scores(node, q, k, None, *_both(lengths))
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(scores), 0.0, np.exp(scores - stats))


def _both(lengths):
    return lengths.get("seq_len_q"), lengths.get("seq_len_kv")


def _amax(x):
    return np.abs(x).max().reshape(1, 1, 1, 1)


def _shared(x, heads):
    """k or v for each head of q."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def _forward(node, q, k, v, **lengths):
    plain = _plain(node, Sdpa)
    out, stats = oracle_attention.sdpa(plain, q, k, v, None, *_both(lengths))
    return out, stats, _weights(plain, q, k, stats, **lengths)


def sdpa_fp8(node, q, k, v, descale_s, scale_s, scale_o, **more):
    lengths = {name: more[name] for name in more if name.startswith("seq_len")}
    q, k, v = (x * more[f"descale_{n}"] for n, x in zip("qkv", (q, k, v), strict=True))
    out, stats, weights = _forward(node, q, k, v, **lengths)
    out = out * descale_s * scale_s
    found = {"O": out * scale_o, "Stats": stats, "Amax_S": _amax(weights), "Amax_O": _amax(out)}
    return tuple(found[port] for port in node.results)


def sdpa_fp8_backward(node, q, k, v, o, dO, stats, descale_s, scale_s, **more):
    lengths = {name: more[name] for name in more if name.startswith("seq_len")}
    q, k, v, o = (x * more[f"descale_{n}"] for n, x in zip("qkvo", (q, k, v, o), strict=True))
    dO = dO * more["descale_dO"]
    plain = _plain(node, SdpaBackward)
    dQ, dK, dV = oracle_attention.backward(plain, q, k, v, o, dO, stats, None, *_both(lengths))
    along = more["scale_dP"] * more["descale_dP"]
    found = {"dQ": dQ * along, "dK": dK * along, "dV": dV * scale_s * descale_s}
    weights = _weights(plain, q, k, stats, **lengths)
    slope = dO @ np.swapaxes(_shared(v, q.shape[1]), 2, 3) - (dO * o).sum(-1, keepdims=True)
    largest = {f"amax_{name}": _amax(x) for name, x in found.items()}
    largest["amax_dP"] = _amax(node.attn_scale * weights * slope)
    scaled = {name: x * more[f"scale_{name}"] for name, x in found.items()}
    return tuple({**scaled, **largest}[port] for port in node.results)


def scales_of_blocks(scales, shape, axis):
    """The factor of each element, found byte by byte in the order that cuDNN documents."""
    b, h, *sizes = scales.shape
    rows, blocks = sizes if axis == -1 else sizes[::-1]
    flat = scales.reshape(b, h, -1)
    i, j = np.indices((rows, blocks))
    tile = (i // 128) * (blocks // 4) + j // 4
    at = tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    each = np.repeat(flat[:, :, at], 32, axis=-1)
    each = each if axis == -1 else np.swapaxes(each, 2, 3)
    return each[:, :, : shape[2], : shape[3]]


def _scaled(arrays, port, axis=-1):
    x = arrays[port]
    return x * scales_of_blocks(arrays[f"descale_{port}"], x.shape, axis)


def sdpa_mxfp8(node, **arrays):
    lengths = {name: arrays[name] for name in arrays if name.startswith("seq_len")}
    q, k, v = (_scaled(arrays, p, axis) for p, axis in (("q", -1), ("k", -1), ("v", -2)))
    out, stats, _ = _forward(node, q, k, v, **lengths)
    found = {"O": out, "Stats": stats, "Amax_O": _amax(out)}
    return tuple(found[port] for port in node.results)


def sdpa_mxfp8_backward(node, **arrays):
    q, k, v, dO = (_scaled(arrays, port) for port in ("q", "k", "v", "dO"))
    turned = {port: _scaled(arrays, port, -2) for port in ("q_T", "k_T", "dO_T")}
    plain = _plain(node, Sdpa)
    lengths = {name: arrays[name] for name in arrays if name.startswith("seq_len")}
    weights = _weights(plain, q, k, arrays["stats"], **lengths)
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    mean = (arrays["dO_f16"] * arrays["o_f16"]).sum(-1, keepdims=True)
    slope = node.attn_scale * weights * (dO @ np.swapaxes(_shared(v, q.shape[1]), 2, 3) - mean)

    def summed(x):
        return x.reshape(x.shape[0], heads, groups, *x.shape[2:]).sum(2)

    found = {
        "dQ": slope @ _shared(turned["k_T"], q.shape[1]),
        "dK": summed(np.swapaxes(slope, 2, 3) @ turned["q_T"]),
        "dV": summed(np.swapaxes(weights, 2, 3) @ turned["dO_T"]),
    }
    found |= {f"amax_{name}": _amax(x) for name, x in found.items()}
    return tuple(found[port] for port in node.results)


OPERATIONS = {
    "sdpa_fp8": sdpa_fp8,
    "sdpa_fp8_backward": sdpa_fp8_backward,
    "sdpa_mxfp8": sdpa_mxfp8,
    "sdpa_mxfp8_backward": sdpa_mxfp8_backward,
}
