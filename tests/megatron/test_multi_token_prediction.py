"""Multi-token prediction trains on the right tokens. Forgotten, it would not fail but train on wrong ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mtraining.layout import SequenceLayout, shard_sequence

from . import tiny_gpt
from .ranks import run_on_ranks

BOUNDS = (0, 50, 50, 51, 140, 192)
"""Documents of 50, 0, 1, 89 and 52 tokens."""

PADDED_LENGTHS = (48, 0, 1, 80, 52)
"""Real tokens in each of them, where the rest is padding."""

CP_SIZES = (1, 2, 4)


def documents(*, padded: bool = False) -> Any:
    from megatron_mtraining import megatron as mtraining

    starts = torch.tensor(BOUNDS, dtype=torch.int32, device=tiny_gpt.device())
    params = mtraining.packed_seq_params(starts)
    if padded:
        lengths = torch.tensor((0, *PADDED_LENGTHS), dtype=torch.int32, device=starts.device)
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = starts
        params.cu_seqlens_q = params.cu_seqlens_kv = lengths.cumsum(0).int()
    return params


def successors(tokens: Tensor, bounds: list[int]) -> Tensor:
    """``[rows, seq_len]``: the next token of the same piece between ``bounds``, or zero."""
    rolled = torch.zeros_like(tokens)
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        rolled[:, start : max(start, end - 1)] = tokens[:, start + 1 : end]
    return rolled


def rolled_parts(layout: str) -> list[tuple[Tensor, Tensor, float, float]]:
    """What this rank's part became and what it should be, and their sums, for tokens of several types and packs."""
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_token_prediction as mtp

    whole = torch.randint(1, 100, (2, tiny_gpt.SEQ_LEN), generator=torch.Generator().manual_seed(0))
    whole = whole.to(tiny_gpt.device())
    ends = [start + length for start, length in zip(BOUNDS[:-1], PADDED_LENGTHS, strict=True)]
    pieces = sorted([*BOUNDS, *ends])
    cases = [
        (whole, [0, tiny_gpt.SEQ_LEN], 1, None),
        (whole > 50, [0, tiny_gpt.SEQ_LEN], -1, None),
        (whole.double(), [0, tiny_gpt.SEQ_LEN], 0, None),
        (whole[:1], list(BOUNDS), -1, documents()),
        (whole[:1], pieces, -1, documents(padded=True)),
    ]
    seen = []
    with tiny_gpt.parallel_job(dataclasses.replace(tiny_gpt.SPARSE, layout=layout), cp_size=4, inner_size=2):
        group = parallel_state.get_context_parallel_group()
        sequence = SequenceLayout(layout, seq_len=tiny_gpt.SEQ_LEN, cp_size=4, block_size=8, node_size=2)
        cut = functools.partial(shard_sequence, layout=sequence, cp_rank=group.rank(), dim=1)
        for tokens, bounds, dim, params in cases:
            part = cut(tokens).movedim(1, dim).contiguous()
            rolled, total = mtp.roll_tensor(part, shifts=-1, dims=dim, cp_group=group, packed_seq_params=params)
            expected = cut(successors(tokens, bounds)).movedim(1, dim)
            seen.append((rolled.cpu(), expected.cpu(), float(total), float(expected.sum())))
    return seen


@pytest.mark.parametrize("layout", ["contiguous", "rotated", "node_striped"])
def test_every_token_meets_its_successor(layout: str):
    for seen in run_on_ranks(rolled_parts, 4, layout=layout):
        for rolled, expected, total, expected_total in seen:
            assert torch.equal(rolled, expected)
            assert total == expected_total


def rolled_gradients() -> tuple[list[tuple[Tensor, Tensor]], list[Any]]:
    """Gradients of a rank's part through the roll and what they should be, and what a call without tokens gives."""
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_token_prediction as mtp

    with tiny_gpt.parallel_job(cp_size=2, inner_size=1):
        group = parallel_state.get_context_parallel_group()
        sequence = SequenceLayout("striped", seq_len=96, cp_size=2, block_size=8)
        weights = torch.rand(1, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        cut = functools.partial(shard_sequence, layout=sequence, cp_rank=group.rank(), dim=1)
        params = documents()
        params.cu_seqlens_q = params.cu_seqlens_kv = torch.tensor([0, 41, 96], dtype=torch.int32).to(tiny_gpt.device())
        found = []
        for bounds, packed in (([0, 41, 96], params), ([0, 96], None)):
            whole = torch.zeros(1, 96, dtype=torch.float64, requires_grad=True)
            (successors(whole * 1.0, bounds) * weights).sum().backward()
            part = torch.zeros(1, 48, dtype=torch.float64, device=tiny_gpt.device(), requires_grad=True)
            rolled, _ = mtp.roll_tensor(part, cp_group=group, packed_seq_params=packed)
            (rolled * cut(weights).to(part.device)).sum().backward()
            found.append((part.grad.cpu(), cut(whole.grad)))
        with pytest.raises(ValueError, match=r"shifts must be -1, one token to the left, got -2. Use --mtraining-lay"):
            mtp.roll_tensor(part, shifts=-2, cp_group=group)
        return found, list(mtp.roll_tensor(None, cp_group=group))


def test_gradients_go_back_to_the_token_that_was_moved():
    """Without documents too: the last token's gradient does not come round to the first one."""
    for found, without_tokens in run_on_ranks(rolled_gradients, 2):
        for gradient, expected in found:
            assert torch.equal(gradient, expected)
        assert without_tokens == [None, None]


def mtp_losses(cp_size: int) -> list[tuple[float, float, dict[str, Tensor]]]:
    """Main loss, logged loss of the extra tokens and all gradients: of a sequence and of a pack of documents."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    seen = []
    with tiny_gpt.parallel_job(cp_size=cp_size, inner_size=1):
        group = parallel_state.get_context_parallel_group()
        for starts, params in (((), None), (BOUNDS[:-1], documents())):
            config = tiny_gpt.transformer_config(mtp_num_layers=2)
            block = get_gpt_mtp_block_spec(config, tiny_gpt.sparse_spec(), use_transformer_engine=False)
            model = tiny_gpt.build(tiny_gpt.sparse_spec(), config=config, mtp_block_spec=block, parallel_output=True)
            part = tiny_gpt.local_part(tiny_gpt.batch() | {"loss_mask": evenly_masked(starts)})
            losses = model(
                part["tokens"],
                part["position_ids"],
                None,
                labels=part["labels"],
                loss_mask=part["loss_mask"],
                packed_seq_params=params,
            )
            loss = (losses * part["loss_mask"]).sum()
            loss.backward()
            seen.append((summed(loss, group), logged_loss(group), gradients(model, group)))
    return seen


def evenly_masked(document_starts: tuple[int, ...]) -> Tensor:
    """A loss mask that leaves each rank as many tokens after they were shifted, once or twice, as before.

    Megatron weights the losses of extra tokens by such counts of each rank by itself, under its own split too.
    """
    mask = torch.ones(1, tiny_gpt.SEQ_LEN)
    for start in (*range(0, 8 * max(CP_SIZES), 8), *document_starts):
        mask[0, start : start + 2] = 0
    return mask


def summed(value: Tensor, group: Any) -> float:
    import torch.distributed as dist

    value = value.detach().double().clone()
    dist.all_reduce(value, group=group)
    return float(value)


def logged_loss(group: Any) -> float:
    """The mean over ranks that Megatron would log for the layers together."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    values = tracker.pop("values", None)
    values = tracker.pop("loss_values", None) if values is None else values
    tracker.clear()
    return summed(values.sum(), group) / group.size()


def gradients(model: Any, group: Any) -> dict[str, Tensor]:
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


@functools.cache
def expected_losses() -> list[tuple[float, float, dict[str, Tensor]]]:
    return run_on_ranks(mtp_losses, 1, cp_size=1)[0]


@pytest.mark.parametrize("cp_size", CP_SIZES[1:])
def test_a_model_trains_as_on_one_rank(cp_size: int):
    for seen in run_on_ranks(mtp_losses, cp_size, cp_size=cp_size):
        for packed, (run, expected) in enumerate(zip(seen, expected_losses(), strict=True)):
            assert run[0] == pytest.approx(expected[0], rel=1e-6)
            if not packed:  # a mean of the ranks' means: documents leave the ranks uneven numbers of tokens
                assert run[1] == pytest.approx(expected[1], rel=1e-6)
            assert any(name.startswith("mtp") for name in expected[2])
            for name, gradient in expected[2].items():
                assert gradient.abs().max() > 0
                torch.testing.assert_close(run[2][name], gradient, atol=2e-4, rtol=1e-4, msg=name)
