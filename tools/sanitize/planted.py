"""Launch that reads past its tensors, for ``run.py``: it is told of a thousand rows more than there are."""

from __future__ import annotations

import torch

from megatron_mtraining.backends.cuda import _C, DTYPES
from megatron_mtraining.backends.cuda.params import current_stream


def main() -> None:
    """Launch; memcheck reports it. Without the tool the reads end in memory of the process or in an error."""
    out, delta = torch.ones(1, 64, 1, 64, dtype=torch.bfloat16, device="cuda"), torch.empty(1, 1, 64, device="cuda")
    params = _C.DeltaParams(
        device=out.get_device(),
        dtype=DTYPES[out.dtype],
        batch=1,
        seq=64 + 1000,
        num_heads=1,
        head_dim=64,
        grad_out=out,
        out=out,
        delta=delta,
    )
    _C.softmax_delta(params, current_stream(out.get_device()))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
