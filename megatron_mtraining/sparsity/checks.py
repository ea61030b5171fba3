"""Refuses queries and keys that cannot be scored, before anything is computed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import invalid

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_query_and_key(query: Tensor, key: Tensor, *, packed: bool) -> None:
    """Both bshd, of one floating dtype, device, batch, length and head_dim; one batch row where documents are packed.

    Raises:
        ValueError: one of them is not.
    """
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() != 4:
            raise invalid(name, "of shape [batch, seq, heads, head_dim]", tuple(tensor.shape))
        if tensor.dtype not in _DTYPES:
            raise invalid(f"{name}.dtype", "float64, float32, bfloat16 or float16", tensor.dtype)
        if 0 in tensor.shape:
            raise invalid(f"{name}.shape", "at least 1 in every dimension", tuple(tensor.shape))
    if key.dtype != query.dtype:
        raise invalid("key.dtype", f"{query.dtype} as query has", key.dtype)
    if key.device != query.device:
        raise invalid("key.device", f"{query.device} as query has", key.device)
    for dim, what in ((0, "batch size"), (1, "sequence length"), (3, "head_dim")):
        if key.shape[dim] != query.shape[dim]:
            raise invalid(f"key.shape[{dim}]", f"the {what} {query.shape[dim]} of query", key.shape[dim])
    if query.shape[2] % key.shape[2]:
        raise invalid("query.shape[2]", f"a multiple of the {key.shape[2]} key heads", query.shape[2])
    if packed and query.shape[0] != 1:
        raise invalid("query.shape[0]", "1 when cu_seqlens is given", query.shape[0], "Pack the batch into one row.")


def checked_scale(softmax_scale: float | None, head_dim: int) -> float:
    """``softmax_scale``, or ``head_dim ** -0.5`` for None.

    Raises:
        ValueError: it is not finite and positive.
    """
    if softmax_scale is None:
        return head_dim**-0.5
    if not (math.isfinite(softmax_scale) and softmax_scale > 0.0):
        raise invalid("softmax_scale", "finite and positive", softmax_scale)
    return float(softmax_scale)
