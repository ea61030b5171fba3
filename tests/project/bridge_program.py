"""The recipe of examples/extend_context on CPU ranks: ``torchrun bridge_program.py --config FILE [changes]``.

``nvidia_resiliency_ext``, which Bridge's training imports unasked, is stood in for where it is missing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys

from examples.extend_context import bridge, bridge_recipe

if __name__ == "__main__":
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        for name in ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess"):
            module = bridge._AnyModule(name)
            module.__path__, module.__version__ = [], "0.0.1"
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
        sys.modules["nvidia_resiliency_ext"].inprocess = sys.modules["nvidia_resiliency_ext.inprocess"]
    bridge_recipe.main()
