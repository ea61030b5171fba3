"""The small training script with packed documents where DOCUMENTS names bounds, and a fault where FAULT names one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch.utils.data import Dataset

from megatron_mtraining import attention as core_attention
from megatron_mtraining.megatron import attention
from tests.launch.pretrain_small import datasets_provider, loss_func

BOUNDS = [int(bound) for bound in os.environ.get("DOCUMENTS", "").split()]
FAULT = os.environ.get("FAULT", "")


class Packed(Dataset):
    """Samples of another data set, each a pack of documents."""

    def __init__(self, samples: Dataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        bounds = {"cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32)} if BOUNDS else {}
        return self.samples[index] | bounds


def packs_provider(num_samples: list[int], vp_stage: int | None = None) -> list[Dataset]:
    """The small script's data sets, packed where there are bounds."""
    return [Packed(samples) for samples in datasets_provider(num_samples, vp_stage)]


def plant(owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Hands calls of ``owner.name`` to ``fault(original, ...)``, once in the life of the process."""
    original = getattr(owner, name)
    if not hasattr(original, "is_planted"):
        planted = functools.wraps(original)(lambda *args, **options: fault(original, *args, **options))
        planted.is_planted = True
        setattr(owner, name, planted)


def other_scale(original: Callable[..., None], layer: Any, *args: Any, **options: Any) -> None:
    """Scores half as large again as the model asks for."""
    original(layer, *args, **options)
    layer._softmax_scale *= 1.5


def other_keys_with_gradients(original: Callable[..., Any], request: Any) -> Any:
    """A selection that is called with gradients leaves the last vertical out."""
    fewer, score = int(torch.is_grad_enabled()), original(request)

    def select() -> Any:
        index = score()()
        return index.rebuild(index.vertical, index.num_vertical - fewer, index.slash, index.num_slash)

    return lambda: select


def joined_documents(original: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    """The first two documents are taken for one."""
    bounds = original(*args, **options)
    return torch.cat([bounds[:1], bounds[2:]])


def padding_selects(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The selection takes padding for text."""
    return original(*args, **options | ({"num_valid": None} if "num_valid" in options else {}))


FAULTS = {
    "scale": (attention.SparseForward, "__init__", other_scale),
    "recomputation": (core_attention, "prepare_selection", other_keys_with_gradients),
    "leak": (attention, "documents_of", joined_documents),
    "padding": (attention, "attend", padding_selects),
}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """One micro-batch, cut for this rank, as a pack where there are documents."""
    batch, params = next(data_iterator), None
    if BOUNDS:
        bounds = batch["cu_seqlens"] = batch["cu_seqlens"].squeeze(0)
        longest = int(bounds.diff().max())
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    batch = get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=None,
        use_per_sequence_balancing=False,
    )
    if FAULT == "shift" and mpu.get_context_parallel_rank() == 1:
        batch["tokens"][:, 1:] = batch["tokens"][:, :-1].clone()
    options = {"packed_seq_params": params} if params is not None else {}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **options)
    return losses, partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    for each in filter(FAULTS.__contains__, FAULT.split()):
        plant(*FAULTS[each])
    packs_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, packs_provider, ModelType.encoder_or_decoder, forward_step)
