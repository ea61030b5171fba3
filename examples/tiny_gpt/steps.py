"""One training step and one evaluation, through Megatron's forward-backward schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from megatron_mtraining import MTrainingConfig, SequenceLayout
from megatron_mtraining import megatron as mtraining

from .model import Trainee


@dataclasses.dataclass(frozen=True, slots=True)
class Stepper:
    """Runs whole batches, ``[batch, seq_len]`` and the same on every rank, through the model."""

    trainee: Trainee
    config: MTrainingConfig
    inner_size: int
    """Ranks in an inner ring."""

    def train(self, batch: dict[str, Tensor]) -> float:
        """One optimizer step; the mean loss per token that it started from, in nats."""
        trainee = self.trainee
        trainee.model.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        loss = self._run(batch, forward_only=False)
        updated, _, _ = trainee.optimizer.step()
        if not updated:
            raise SystemExit("The optimizer found a gradient that is not finite and did not step.")
        trainee.scheduler.step(increment=1)
        return loss

    def evaluate(self, batch: dict[str, Tensor]) -> float:
        """The mean loss per token, in nats, without a gradient."""
        self.trainee.model.eval()
        with torch.no_grad():
            loss = self._run(batch, forward_only=True)
        self.trainee.model.train()
        return loss

    def _run(self, batch: dict[str, Tensor], *, forward_only: bool) -> float:
        batch_size, seq_len = batch["tokens"].shape
        cp_size = parallel_state.get_context_parallel_world_size()
        layout = SequenceLayout(
            self.config.layout,
            seq_len=seq_len,
            cp_size=cp_size,
            block_size=self.config.block_size,
            node_size=self.inner_size,
        )
        part = mtraining.shard_batch(batch, layout, parallel_state.get_context_parallel_rank())
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([{name: tensor.to(self.trainee.device) for name, tensor in part.items()}]),
            model=[self.trainee.model],
            num_microbatches=1,
            seq_length=layout.local_len,
            micro_batch_size=batch_size,
            forward_only=forward_only,
        )
        total = reports[0]["loss_sum_and_tokens"]
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return float(total[0] / total[1])


def forward_step(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """What Megatron's schedule calls: this rank's loss per token, ``[batch, local_len]``, and how it is summed."""
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(sum_losses, batch["loss_mask"])


def sum_losses(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss summed over this rank's tokens, how many they are, and what is reported."""
    loss_sum = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return loss_sum, num_tokens, {"loss_sum_and_tokens": torch.stack([loss_sum.detach(), num_tokens.float()])}
