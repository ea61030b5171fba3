"""Common treatment of tensors in every part: dtypes, shapes, the scale, the way to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, partial results and gradients of such inputs: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor on ``device`` that the host does not wait for."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def cached_tensors(*, maxsize: int) -> Callable[[Callable[_Given, _Made]], Callable[_Given, _Made]]:
    """Apply ``functools.lru_cache`` to functions whose result holds tensors, so that any later call may use these.

    Arguments are positional, and where tensors are made on a GPU its device is the last. Every stream comes after the
    copy to the device, as long as that has not happened. Tensors are no inference tensors, which no backward could
    save. Fake and functional tensors, and others that stand for memory, are made anew and not cached.

    Raises:
        RuntimeError: in a call of the function: a CUDA graph is being captured, and would copy from host memory that is
            long something else when it is replayed.
    """

    def decorate(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
        @lru_cache(maxsize=maxsize)
        def cached(*given: object) -> _Cached:
            if not _makes_memory():
                raise _NotCachedError
            with torch.inference_mode(False):
                return _Cached.of(make, given)

        @wraps(make)
        def find(*given: object) -> _Made:
            try:
                found = cached(*given)
            except _NotCachedError:
                return make(*given)
            found.come_after(given[-1])
            return found.made

        find.cache_clear = cached.cache_clear
        return find

    return decorate


@dataclass(slots=True)
class _Cached:
    """Cached result, and on a GPU until it is there the event behind its copy."""

    made: Any
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, make: Callable[..., Any], given: tuple[object, ...]) -> _Cached:
        """Make the result."""
        device = given[-1]
        if not (isinstance(device, torch.device) and device.type == "cuda"):
            return cls(make(*given), None)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "A CUDA graph must be captured behind the same call, which makes tables, got none before."
            )
        return cls(make(*given), torch.cuda.current_stream(device).record_event())

    def come_after(self, device: torch.device) -> None:
        """Make the current stream wait for the copy, which is there when a graph is captured: torch waits before it."""
        copied = self.copied  # another thread may find that it is there
        if copied is None or torch.cuda.is_current_stream_capturing():
            return
        if copied.query():
            self.copied = None
        else:
            torch.cuda.current_stream(device).wait_event(copied)


class _NotCachedError(Exception):
    """Error of a result that is not for later calls."""


def _makes_memory() -> bool:
    """True if a tensor made now has memory of its own; it has none under a fake mode or a transform of torch.func."""
    made = torch.empty(1, device="cpu")
    try:
        return type(made) is Tensor and made.data_ptr() != 0
    except RuntimeError:
        return False
