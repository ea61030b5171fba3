"""One launch that reads past its tensors, for ``run.py``: it is told of a thousand rows more than there are."""

from __future__ import annotations

import torch

from megatron_mtraining.kernels import _C, DTYPES
from megatron_mtraining.kernels.params import current_stream, row_scalars, rows


def main() -> None:
    """Launches; memcheck reports it. Without the tool the reads end in memory of the process or in an error."""
    out, delta = torch.ones(1, 64, 1, 64, dtype=torch.bfloat16, device="cuda"), torch.empty(1, 1, 64, device="cuda")
    params = _C.DeltaParams()
    params.device, params.dtype = torch.cuda.current_device(), DTYPES[out.dtype]
    params.batch, params.seq, params.num_heads, params.head_dim = 1, 64 + 1000, 1, 64
    params.grad_out, params.out, params.delta = rows(out), rows(out), row_scalars(delta)
    _C.softmax_delta(params, current_stream(out.device))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
