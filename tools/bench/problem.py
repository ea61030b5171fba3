"""Problem that is measured: one attention call's sizes, and the random tensors that all baselines get."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mtraining.errors import invalid

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of a problem, the same for every baseline."""

    query: Tensor
    """Query ``[batch, seq, num_heads, head_dim]``."""

    key: Tensor
    """Key ``[batch, seq, num_kv_heads, head_dim]``."""

    value: Tensor
    """Value, shaped as ``key``."""

    grad_out: Tensor
    """Gradient of the output, shaped as ``query``."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes of one call.

    Raises:
        ValueError: a size does not fit; the sentence names the flag.
    """

    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    batch: int = 1
    seed: int = 0
    index_sharing: str = "head"
    """Owners of a list of the index, as in the configuration."""

    def __post_init__(self) -> None:
        for flag, size in (
            ("--seq", self.seq_len),
            ("--heads", self.num_heads),
            ("--kv-heads", self.num_kv_heads),
            ("--head-dim", self.head_dim),
            ("--batch", self.batch),
        ):
            if size < 1:
                raise invalid(flag, "at least 1", size)
        if not 0 <= self.seed < 2**63:
            raise invalid("--seed", "from 0 to 2 ** 63 - 1", self.seed)
        if self.num_heads % self.num_kv_heads:
            raise invalid("--heads", f"a multiple of --kv-heads {self.num_kv_heads}", self.num_heads)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise invalid("--device", "cpu on a machine without a CUDA GPU", self.device)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_lists(self) -> int:
        """Lists of a batch row of the index."""
        return self.num_kv_heads if self.index_sharing == "kv_group" else self.num_heads

    @property
    def softmax_scale(self) -> float:
        """Factor by which every baseline multiplies scores."""
        return self.head_dim**-0.5

    def inputs(self) -> Inputs:
        """Return standard normal tensors; the same ones at every call with the same seed on the same kind of device."""
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def randn(num_heads: int) -> Tensor:
            shape = (self.batch, self.seq_len, num_heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        return Inputs(
            query=randn(self.num_heads),
            key=randn(self.num_kv_heads),
            value=randn(self.num_kv_heads),
            grad_out=randn(self.num_heads),
        )

    def __str__(self) -> str:
        dtype = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        batch = f"batch {self.batch}, " if self.batch > 1 else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads"
        shared = ", one list for a key/value head" if self.num_lists < self.num_heads else ""
        return f"{batch}{self.seq_len} tokens, {heads}, head_dim {self.head_dim}, {dtype}{shared}"
