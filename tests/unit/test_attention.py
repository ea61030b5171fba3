"""``sparse_attention`` on one device: which gradients flow, and which backend runs."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.backends import cuda, resolve
from megatron_mtraining.backends.cuda.interface import BUILD_COMMAND
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.backends.reference import backend as reference
from megatron_mtraining.backends.resolve import resolve_backend
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.errors import BackendUnavailableError

from .attention_inputs import random_index, random_inputs

CASE = {"device": torch.device("cpu"), "dtype": torch.float32, "head_dim": 64, "block_size": 64}


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 3, 3, 7], dtype=torch.int32)])
def test_gradcheck(cu_seqlens: torch.Tensor | None) -> None:
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    index = random_index(1 if bounds is None else 3, 2, 7, 2, cu_seqlens=bounds)
    inputs = tuple(tensor.requires_grad_() for tensor in random_inputs(1, 7, 2, 1, 3))
    assert torch.autograd.gradcheck(lambda *qkv: sparse_attention(*qkv, index=index, cu_seqlens=cu_seqlens), inputs)


def test_gradients_through_out_and_lse_add_up() -> None:
    """Each alone, and both together: an output that the loss does not use is no gradient of zeros in disguise."""
    index = random_index(1, 2, 19, 4)
    inputs = [tensor.requires_grad_() for tensor in random_inputs(1, 19, 2, 2, 8)]
    out, lse = sparse_attention(*inputs, index=index)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    from_out = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    from_lse = torch.autograd.grad(lse, inputs, grad_lse, retain_graph=True)
    from_both = torch.autograd.grad([out, lse], inputs, [grad_out, grad_lse])
    for first, second, both in zip(from_out, from_lse, from_both, strict=True):
        torch.testing.assert_close(first + second, both, rtol=1e-12, atol=1e-12)
    assert bool(from_out[2].any())
    assert not bool(from_lse[2].any()), "lse does not depend on the values"


def test_inputs_that_need_no_gradient_get_none() -> None:
    query, key, value = random_inputs(1, 9, 2, 2, 4)
    key.requires_grad_()
    sparse_attention(query, key, value, index=random_index(1, 2, 9, 4)).out.sum().backward()
    assert query.grad is None
    assert value.grad is None
    assert key.grad is not None


def test_differentiable_once() -> None:
    inputs = [tensor.requires_grad_() for tensor in random_inputs(1, 9, 2, 2, 4)]
    out = sparse_attention(*inputs, index=random_index(1, 2, 9, 4)).out
    (grad,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    for others in (0.0, out.sum()):  # beside what has a derivative, that of the gradient would be left out in silence
        for leaf in inputs:
            with pytest.raises(RuntimeError, match="Sparse attention must be differentiated once, got a derivative"):
                torch.autograd.grad(grad.sum() + others, [leaf], retain_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match="Sparse attention must be differentiated once, got a derivative"):
        grad.sum().backward()


def test_a_checkpointed_call_has_its_gradients_in_a_graph() -> None:
    index, inputs = random_index(1, 2, 9, 4), [each.requires_grad_() for each in random_inputs(1, 9, 2, 2, 4)]

    def attend(*given: torch.Tensor) -> torch.Tensor:
        return sparse_attention(*given, index=index).out

    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    out = checkpoint(attend, *inputs, use_reentrant=False)
    for grad, other in zip(torch.autograd.grad(out.sum(), inputs, create_graph=True), expected, strict=True):
        assert grad.requires_grad and torch.equal(grad, other)


def test_changing_an_input_before_backward_is_noticed() -> None:
    """Saved tensors are the only ones that backward reads, so autograd's own check covers them."""
    query, key, value = (tensor.requires_grad_() for tensor in random_inputs(1, 9, 2, 2, 4))
    out = sparse_attention(query, key, value, index=random_index(1, 2, 9, 4)).out
    with torch.no_grad():
        key.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_softmax_delta() -> None:
    grad_out, out, grad_lse = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 4), torch.randn(2, 3, 5)
    got = ReferenceBackend().softmax_delta(grad_out, out, grad_lse)
    torch.testing.assert_close(got, (grad_out * out).sum(-1).transpose(1, 2) - grad_lse)
    rounded = grad_out.bfloat16(), out.bfloat16()
    got = ReferenceBackend().softmax_delta(*rounded, None)
    torch.testing.assert_close(got, (rounded[0].float() * rounded[1].float()).sum(-1).transpose(1, 2))


def test_softmax_delta_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    grad_out, out, grad_lse = torch.randn(2, 7, 3, 4), torch.randn(2, 7, 3, 4), torch.randn(2, 3, 7)
    whole = ReferenceBackend().softmax_delta(grad_out, out, grad_lse)
    monkeypatch.setattr(reference, "_PIECE_ELEMENTS", 2 * 3 * 4 * 3)  # three tokens
    assert torch.equal(ReferenceBackend().softmax_delta(grad_out, out, grad_lse), whole)


def test_autocast_does_not_reach_inside() -> None:
    index = random_index(1, 2, 19, 4)
    inputs = [tensor.requires_grad_() for tensor in random_inputs(1, 19, 2, 2, 8, dtype=torch.float32)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, lse = sparse_attention(*inputs, index=index)
            results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), inputs)))
    assert all(torch.equal(without, within) for without, within in zip(*results, strict=True))


def test_reference_by_name() -> None:
    assert isinstance(resolve_backend("reference", **CASE), ReferenceBackend)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend must be one of auto, reference, cuda, got 'triton'"):
        resolve_backend("triton", **CASE)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_logs_what_auto_chose_and_why_once(
    rank: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    resolve._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger=resolve.logger.name):
        for _ in range(3):
            assert isinstance(resolve_backend("auto", **CASE), ReferenceBackend)
    case = "backend auto: reference for torch.float32, head_dim 64, block_size 64 on cpu."
    assert caplog.messages == ([f"{case} {cuda.why_unavailable(**CASE)}"] if rank == "0" else [])


def test_a_slow_way_on_a_gpu_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a host lacks is said on that host."""
    monkeypatch.setenv("RANK", "8")
    with caplog.at_level(logging.INFO, logger=resolve.logger.name):
        for local_rank, device in (("1", "cuda"), ("0", "cuda"), ("0", "cpu")):
            monkeypatch.setenv("LOCAL_RANK", local_rank)
            resolve._log_choice.cache_clear()
            assert isinstance(resolve_backend("auto", **CASE | {"device": torch.device(device)}), ReferenceBackend)
    assert caplog.records[0].levelno == logging.WARNING
    assert len(caplog.messages) == 1
    assert "float32, head_dim 64, block_size 64 on cuda. The CUDA kernels compute in bfloat16" in caplog.messages[0]


def test_a_named_backend_never_falls_back() -> None:
    """On CPU tensors the kernels cannot run, built or not."""
    inputs = random_inputs(1, 9, 2, 2, 4)
    with pytest.raises(BackendUnavailableError) as refusal:
        sparse_attention(*inputs, index=random_index(1, 2, 9, 4), config=MTrainingConfig(backend="cuda", block_size=4))
    assert str(refusal.value).endswith(".")


def test_a_missing_build_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    case = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64, "block_size": 64}
    with pytest.raises(BackendUnavailableError, match=re.escape(BUILD_COMMAND)):
        resolve_backend("cuda", **case)
    for name, other in (
        ("device", torch.device("cpu")),
        ("dtype", torch.float32),
        ("head_dim", 80),
        ("block_size", 16),
    ):
        with pytest.raises(BackendUnavailableError, match=f"got {other}") as refusal:  # which no build would change
            resolve_backend("cuda", **case | {name: other})
        assert BUILD_COMMAND not in str(refusal.value)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_kernels_run_where_they_can(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = object()
    monkeypatch.setattr(cuda, "why_unavailable", lambda **case: None)
    monkeypatch.setattr(cuda, "cuda_backend", lambda: chosen)
    assert resolve_backend(name, **CASE) is chosen
