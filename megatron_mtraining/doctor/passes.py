"""Run of a training script up to the place where training would begin, and of something else instead of training."""

from __future__ import annotations

import functools
import gc
import traceback
from argparse import Namespace
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..megatron.compat import Patches, has_module, require_symbol
from .errors import CannotStartError, quoted
from .flags import Setting, apply
from .training import Training

_ARGUMENTS, _TRAINING = "megatron.training.arguments", "megatron.training.training"
_USED = ("forward_step_func", "model", "train_data_iterator", "config")
_Result = TypeVar("_Result")
Start = Callable[[Callable[[], None]], None]
"""Callable that runs the script once; its argument runs when Megatron may be imported, before the script."""


class _TrainingReachedError(BaseException):
    """Unwinding of the script; no Exception, so that no script takes it for an error."""


class Passes:
    """Runs of one script, one after the other in the same processes.

    Args:
        start: runs the script.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._is_first = True
        self.notes: list[str] = []
        """Changes to the flags in the first run."""

    def read_flags(self) -> Namespace:
        """Return the script's flags, checked and made small, before anything of Megatron has started.

        Raises:
            CannotStartError: the script does not parse them with Megatron's parser, or they leave nothing to examine.
        """
        patches, found = Patches(), []

        def record(_original: Callable[..., Any], args: Namespace, *_: Any, **__: Any) -> None:
            apply(Setting(), args)
            found.append(args)
            raise _TrainingReachedError

        def install() -> None:
            _check_megatron()
            patches.wrap(_ARGUMENTS, "validate_args", record, parameters=("args",))

        self._unwound(install, patches)
        if not found:
            raise CannotStartError("The script must parse its flags with megatron.training, got its end before that.")
        return found[0]

    def run(self, setting: Setting, body: Callable[[Training], _Result]) -> _Result:
        """Run ``body`` on what Megatron has built under ``setting``. Every rank of the job runs the same.

        Raises:
            CannotStartError: the script ends, or raises, before it trains.
        """
        patches, results = Patches(), []

        def install() -> None:
            _check_megatron()
            patches.wrap(_ARGUMENTS, "validate_args", functools.partial(self._validate, setting), parameters=("args",))
            patches.wrap(_TRAINING, "train", functools.partial(_instead, body, results), parameters=_USED)

        self._unwound(install, patches)
        if not results:
            raise CannotStartError("The script must train with megatron.training's train(), got its end before that.")
        self._is_first = False
        return results[0]

    def _unwound(self, install: Callable[[], None], patches: Patches) -> None:
        """Run the script to where it is unwound, and have Megatron forget it."""
        try:
            self._start(install)
        except _TrainingReachedError:
            pass
        except (CannotStartError, _CheckError):
            raise
        except SystemExit as end:
            if end.code == 2:  # after an error's sentence
                raise
            raise CannotStartError(f"The script must start with these flags, got its exit status {end.code}.") from end
        except Exception as error:
            traceback.print_exc()
            raise CannotStartError(f"The script must start with these flags, got {quoted(error)}") from error
        finally:
            patches.undo()
        _forget()

    def _validate(
        self, setting: Setting, original: Callable[..., Any], args: Namespace, *rest: Any, **options: Any
    ) -> Any:
        notes = apply(setting, args)
        if self._is_first:
            self.notes = notes
        return original(args, *rest, **options)


class _CheckError(RuntimeError):
    """Error raised by a check; its cause has the details."""


def _instead(body: Callable, results: list, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    training = Training.of(original, args, kwargs)
    try:
        results.append(body(training))
    except CannotStartError:
        raise
    except Exception as error:
        raise _CheckError(f"a check failed to run: {quoted(error)}") from error
    raise _TrainingReachedError


def _check_megatron() -> None:
    """Raise for a Megatron without a training loop, or one that cannot forget a run."""
    if not has_module("megatron.training"):
        raise CannotStartError(
            "megatron.training must be importable, got no such module. "
            "Run a script of a Megatron-LM tree, or install megatron-core 0.19."
        )
    require_symbol(_TRAINING, "destroy_global_state")


def _forget() -> None:
    """Have Megatron forget arguments, groups and everything else that it holds one of."""
    require_symbol(_TRAINING, "destroy_global_state")()
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
