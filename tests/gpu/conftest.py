"""The kernel families under test."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["sm80", "sm90"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once for each kernel family that the GPU has, and makes the backend take that one."""
    from megatron_mtraining.backends.cuda.operators import families

    if request.param not in families(torch.device("cuda")):
        pytest.skip(f"the {request.param} kernels run on another GPU than {torch.cuda.get_device_name()}")
    monkeypatch.setenv("MTRAINING_KERNELS", request.param)
    return request.param
