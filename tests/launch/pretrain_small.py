"""A training script as Megatron's pretrain_gpt.py is one, over text that has something to attend to.

It knows nothing of this package. Megatron's scripts are in no wheel; ``megatron.training``, which they start, is.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch.utils.data import Dataset

MOTIF = 48


class RepeatedText(Dataset):
    """Samples that each repeat a motif with noise; sample ``i`` is the same in every run."""

    def __init__(self, num_samples: int, seq_len: int, vocab_size: int) -> None:
        self.num_samples, self.seq_len, self.vocab_size = num_samples, seq_len, vocab_size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        motif = torch.randint(0, self.vocab_size, (MOTIF,), generator=generator)
        text = motif.repeat(self.seq_len // MOTIF + 2)[: self.seq_len + 1]
        noise = torch.randint(0, self.vocab_size, text.shape, generator=generator)
        text = torch.where(torch.rand(text.shape, generator=generator) < 0.9, text, noise)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.seq_len),
            "position_ids": torch.arange(self.seq_len),
        }


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> list[Dataset]:
    """Training, validation and test data of as many samples as Megatron asks for, and some that a resumed run skips."""
    args = get_args()
    return [RepeatedText((samples or 0) + 64, args.seq_length, args.vocab_size) for samples in num_samples]


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Sum and number of the losses that count, as pretrain_gpt.py reports them."""
    total = torch.sum(losses.view(-1).float() * loss_mask.view(-1))
    num_tokens = loss_mask.sum().to(torch.int)
    return total, num_tokens, {"lm loss": torch.cat([total.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator, model):
    """One micro-batch, cut for this rank by the function that Megatron's own scripts call."""
    batch = get_batch_on_this_cp_rank(
        next(data_iterator),
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=None,
        use_per_sequence_balancing=False,
    )
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
