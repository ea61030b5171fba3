"""How large the tensors are that a piece of code makes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestResult(TorchDispatchMode):
    """Remembers the most bytes that an operation's new result took."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self.num_bytes = max(self.num_bytes, result.untyped_storage().nbytes())
        return results
