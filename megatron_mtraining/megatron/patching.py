"""How a function of Megatron is put in another's place, and put back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .compat import require_symbol


def rebind(old: Any, new: Any) -> None:
    """Points every module attribute that is ``old`` at ``new``, as ``from module import name`` leaves many."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)


class Patches:
    """Wrappers around functions of Megatron, each put on once and taken off together."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    def wrap(
        self, module_name: str, name: str, wrapper: Callable[..., Any], *, parameters: tuple[str, ...] = ()
    ) -> None:
        """Has every call of ``module_name.name`` go to ``wrapper(original, *args, **kwargs)``; once for each name.

        Args:
            module_name: where the function is defined. It is replaced wherever else it is bound by name too.
            name: of the function.
            wrapper: takes the original first.
            parameters: names that the function must take for the wrapper to be right.

        Raises:
            MissingSymbolError: this Megatron has no such function, or one without these parameters.
        """
        target = f"{module_name}.{name}"
        if target in self._wrapped:
            return
        original = require_symbol(module_name, name, parameters=parameters)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self._wrapped[target] = (original, wrapped)
        rebind(original, wrapped)

    def undo(self) -> None:
        """Binds the originals again; does nothing where nothing is wrapped."""
        while self._wrapped:
            _, (original, wrapped) = self._wrapped.popitem()
            rebind(wrapped, original)

    def __len__(self) -> int:
        return len(self._wrapped)
