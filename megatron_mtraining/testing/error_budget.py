"""Error budget of a result in low precision: twice the error of the plain way of computing it.

The plain way is the definition as one dense mask, every step in the low dtype. So a budget is measured for each case
and not chosen, and kernels and reference stand under the same rule in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from ..types import AttentionIndex, AttentionOutput
from .oracle import allowed_mask

Attention = Callable[[Tensor, Tensor, Tensor], AttentionOutput]


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: AttentionIndex,
    *,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> AttentionOutput:
    """Compute dense masked attention, every step and ``lse`` in the inputs' dtype. Quadratic memory, differentiable.

    Every row must have a key. Arguments and shapes are those of :func:`megatron_mtraining.sparse_attention`.
    """
    group = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(group, dim=2) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    mask = allowed_mask(index, seq_len=query.shape[1], cu_seqlens=cu_seqlens).to(query.device)
    mask = mask.repeat_interleave(query.shape[2] // index.num_lists, dim=1)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), value)
    return AttentionOutput(out, torch.logsumexp(scores, -1))


def run_with_gradients(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
) -> dict[str, Tensor]:
    """Run ``attention`` on copies of the inputs and backward from the given gradients.

    Returns:
        ``out``, ``lse``, ``grad_query``, ``grad_key`` and ``grad_value``, detached.
    """
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    result = attention(*inputs)
    outputs = [result.out] if grad_lse is None else [result.out, result.lse]
    given = [grad.to(output.dtype) for grad, output in zip((grad_out, grad_lse), outputs, strict=False)]
    grads = torch.autograd.grad(outputs, inputs, given)
    names = ("grad_query", "grad_key", "grad_value")
    return {"out": result.out.detach(), "lse": result.lse.detach(), **dict(zip(names, grads, strict=True))}


def gradient_rounding(
    query: Tensor, key: Tensor, value: Tensor, *, grad_out: Tensor, softmax_scale: float | None = None
) -> dict[str, float]:
    """Return what float32 rounding alone can put into ``grad_query`` and ``grad_key``.

    A score's gradient is ``p * (grad_out . value - grad_out . out)``. Blockwise backward rounds the two products apart,
    where the plain way subtracts a mean of the first from itself; so where they cancel, as in a row with one key, the
    plain way is exact by chance and no measure. Inner products of float32 vectors differ by ``eps`` times their norms.
    """
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    norms = float(grad_out.double().norm(dim=-1).max() * value.double().norm(dim=-1).max())
    in_score = torch.finfo(torch.float32).eps * norms * scale
    return {"grad_query": in_score * float(key.abs().max()), "grad_key": in_score * float(query.abs().max())}


def assert_within_budget(
    ours: Tensor, low_precision: Tensor, exact: Tensor, *, name: str, rounding: float = 0.0
) -> None:
    """Assert ``|ours - exact| <= 2 * |low_precision - exact|`` plus rounding, for the largest and the mean square.

    Args:
        ours: the result under test.
        low_precision: the plain way's result in the dtype of the inputs.
        exact: the float64 result.
        name: what the tensor is, for the message.
        rounding: what is allowed beside one rounding of the result to its dtype.

    Raises:
        AssertionError: an error is over its budget, a value is NaN, or infinities are not where the exact result has
            them; the message says by how much and where.
    """
    assert ours.shape == exact.shape, f"{name} must have shape {tuple(exact.shape)}, got {tuple(ours.shape)}."
    exact = exact.double().to(ours.device)
    ours_wide, low = ours.double(), low_precision.double().to(ours.device)
    finite = exact.isfinite()
    same_infinities = torch.equal(ours_wide.isfinite(), finite) and torch.equal(ours_wide[~finite], exact[~finite])
    assert same_infinities, f"{name} has {_count_misfits(ours_wide, exact)} values that are NaN or wrongly infinite."
    if not bool(finite.any()):
        return
    error, budget = (torch.where(finite, tensor - exact, 0.0).abs() for tensor in (ours_wide, low))
    size = torch.where(finite, exact, 0.0).abs()
    for kind, norm in (("largest", torch.amax), ("root mean square", _root_mean_square)):
        allowed = 2.0 * float(norm(budget)) + torch.finfo(ours.dtype).eps * float(norm(size)) + rounding
        assert float(norm(error)) <= allowed, (
            f"{name}: {kind} error {float(norm(error)):.3e} is over its budget {allowed:.3e} "
            f"(plain {low_precision.dtype} has {float(norm(budget)):.3e}); {_worst(error, ours_wide, exact)}."
        )


def assert_all_within_budget(
    ours: dict[str, Tensor],
    low_precision: dict[str, Tensor],
    exact: dict[str, Tensor],
    *,
    rounding: Mapping[str, float] = MappingProxyType({}),
    case: str = "",
) -> None:
    """Call :func:`assert_within_budget` for each result of :func:`run_with_gradients`, ``rounding`` by its name."""
    for name, result in ours.items():
        allowance = rounding.get(name, 0.0)
        label = f"{case} {name}".strip()
        assert_within_budget(result, low_precision[name], exact[name], name=label, rounding=allowance)


@contextmanager
def nan_filled_empty() -> Iterator[None]:
    """Have ``torch.empty`` give NaN (the largest value for integers), so what a kernel forgets to write shows."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = was_filled


def _root_mean_square(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()


def _count_misfits(ours: Tensor, exact: Tensor) -> int:
    return int((ours.isnan() | ((ours != exact) & ~(ours.isfinite() & exact.isfinite()))).sum())


def _worst(error: Tensor, ours: Tensor, exact: Tensor) -> str:
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return f"worst at {at}: {float(ours[at]):.6g} for {float(exact[at]):.6g}"
