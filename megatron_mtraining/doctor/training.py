"""Runs of a training script up to the place where training would begin, and there a step: loss and gradients."""

from __future__ import annotations

import contextlib
import gc
import traceback
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..megatron.attention import SparseForward
from ..megatron.compat import Patches, arguments_of, has_module, require_symbol
from ..transport.process_group import gather_numbers
from . import CannotStartError
from .flags import Setting, apply, num_microbatches
from .report import quoted

_STATE = "megatron.core.parallel_state"
_TRAINING = "megatron.training.training"
_VALIDATE = ("megatron.training.arguments", "validate_args", ("args",))
_TRAIN = (_TRAINING, "train", ("forward_step_func", "model", "train_data_iterator", "config"))
_Result = TypeVar("_Result")
Batch = dict[str, Any]
Start = Callable[[Callable[[], None]], None]
"""Callable that runs the script once; its argument runs when Megatron may be imported, before the script."""


@dataclass(frozen=True, slots=True)
class Step:
    """Results of one step."""

    loss: float
    """Mean loss over the tokens of all ranks."""

    gradients: dict[str, Tensor]
    """Gradients of this rank's parameters, reduced over replicas; float32 on the CPU. Empty after a forward alone."""


@dataclass(frozen=True, slots=True)
class Training:
    """A job at the place where training would begin."""

    args: Namespace
    forward_step: Callable[..., Any]
    chunks: list[nn.Module]
    """Parts of the model on this rank, as Megatron wraps them."""
    iterators: list[Any]
    """Data iterator of each chunk; None where this rank reads no data."""
    config: Any
    is_listed: bool
    """True if Megatron passes the iterators as a list."""

    @classmethod
    def of(cls, train: Callable[..., Any], args: tuple, kwargs: dict) -> Training:
        """Return the job that a call of Megatron's ``train`` was given."""
        given = arguments_of(train, args, kwargs)
        iterator, config = given["train_data_iterator"], given["config"]
        if config.finalize_model_grads_func is None:
            config.finalize_model_grads_func = require_symbol("megatron.core.distributed", "finalize_model_grads")
        config.grad_scale_func = None
        for chunk in given["model"]:
            chunk.train()
        is_listed = isinstance(iterator, list)
        options = require_symbol("megatron.training.global_vars", "get_args")()
        iterators = iterator if is_listed else [iterator]
        return cls(options, given["forward_step_func"], given["model"], iterators, config, is_listed)

    @property
    def attentions(self) -> dict[str, SparseForward]:
        """Attention layers of this package on this rank, by name, in their order."""
        return {name: module for name, module in self._modules() if isinstance(module, SparseForward)}

    @property
    def output_layer(self) -> nn.Module | None:
        """Layer that makes logits; None on a rank whose pipeline stage has none."""
        found = [module for name, module in self._modules() if name.rpartition(".")[2] == "output_layer"]
        return found[-1] if found else None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's trained parameters by name; the pipeline stage goes before it where there are several."""
        return {
            self._name(number, name): parameter
            for number, chunk in enumerate(self.chunks)
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        }

    def weights(self) -> dict[str, Tensor]:
        """Return copies of all parameters and buffers, on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of another run of the script on this rank."""
        for name, tensor in self._tensors().items():
            if name in weights and weights[name].shape == tensor.shape:
                tensor.copy_(weights[name])

    def read_batches(self) -> list[Batch | None]:
        """Return the next micro-batch of each iterator, as the data set gives it, on the CPU."""
        return [None if each is None else _on_cpu(next(each)) for each in self.iterators]

    def step(self, batches: list[Batch | None], *, forward_only: bool = False, loss_hook: Any = None) -> Step:
        """Run one step in which every micro-batch is the given one. A collective over all ranks.

        Args:
            batches: for each iterator.
            forward_only: whether to leave gradients out.
            loss_hook: takes what the model returned, token by token, of every micro-batch.
        """
        for chunk in self.chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
        # A router's bias, for one, changes with every step. Megatron's wrapper calls something else ``buffers``.
        buffers = [(each, each.clone()) for chunk in self.chunks for _, each in chunk.named_buffers()]
        forward_step = self.forward_step if loss_hook is None else _with_loss_hook(self.forward_step, loss_hook)
        run = require_symbol("megatron.core.pipeline_parallel", "get_forward_backward_func")()
        iterators = [None if batch is None else _repeated(batch) for batch in batches]
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            reports = run(
                forward_step_func=forward_step,
                data_iterator=iterators if self.is_listed else iterators[0],
                model=self.chunks,
                num_microbatches=num_microbatches(self.args),
                seq_length=self.args.seq_length,
                micro_batch_size=self.args.micro_batch_size,
                decoder_seq_length=getattr(self.args, "decoder_seq_length", None),
                forward_only=forward_only,
            )
        gradients = {} if forward_only else {name: _gradient(each) for name, each in self.parameters().items()}
        for buffer, value in buffers:
            buffer.copy_(value)
        return Step(_mean_loss(reports), gradients)

    @contextlib.contextmanager
    def rounded_otherwise(self, seed: int) -> Iterator[None]:
        """Move every weight one unit in the last place up or down, at random, the same on all replicas."""
        before = {name: parameter.detach().clone() for name, parameter in self.parameters().items()}
        try:
            for name, parameter in self.parameters().items():
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()) + seed)
                up = torch.rand(parameter.shape, generator=generator, device=parameter.device) < 0.5
                eps = torch.finfo(parameter.dtype).eps
                parameter.data.mul_(torch.where(up, 1 + eps, 1 - eps).to(parameter.dtype))
            yield
        finally:
            for name, parameter in self.parameters().items():
                parameter.data.copy_(before[name])

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for number, chunk in enumerate(self.chunks):
            for name, module in chunk.named_modules():
                yield self._name(number, name), module

    def _tensors(self) -> dict[str, Tensor]:
        return {
            self._name(number, name): tensor
            for number, chunk in enumerate(self.chunks)
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        }

    def _name(self, chunk: int, name: str) -> str:
        while name.startswith("module."):
            name = name.removeprefix("module.")
        stage = f"stage {rank_of('pipeline_model_parallel')}: " if self.args.pipeline_model_parallel_size > 1 else ""
        return f"{stage}{f'chunk {chunk}: ' if len(self.chunks) > 1 else ''}{name}"


def rank_of(group: str) -> int:
    """Return this rank within one of Megatron's groups, named as its ``parallel_state`` does."""
    return require_symbol(_STATE, f"get_{group}_rank")()


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    return torch.zeros(parameter.shape, device="cpu") if gradient is None else gradient.detach().float().cpu().clone()


def _mean_loss(reports: list[dict[str, Any]]) -> float:
    """Return the mean over the tokens of all ranks of what the last stages' loss function reports first."""
    total = count = 0.0
    for report in reports or ():
        numbers = torch.as_tensor(next(iter(report.values())), device="cpu").detach().double().flatten().tolist()
        total, count = total + numbers[0], count + (numbers[1] if len(numbers) == 2 else 1.0)
    table = gather_numbers([total, count]).sum(0)
    return float(table[0] / table[1])


def _repeated(batch: Batch) -> Iterator[Batch]:
    while True:
        yield {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}


def _on_cpu(batch: Batch) -> Batch:
    return {name: value.detach().cpu().clone() if isinstance(value, Tensor) else value for name, value in batch.items()}


def _with_loss_hook(forward_step: Callable[..., Any], loss_hook: Callable[[Tensor], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        output, *rest = forward_step(*args, **kwargs)
        if isinstance(output, Tensor):
            loss_hook(output.detach())
        return output, *rest

    return call


class _ReachedError(BaseException):
    """Unwinding of the script; no Exception, so that no script takes it for an error."""


class _CheckError(RuntimeError):
    """Error raised by a check; its cause has the details."""


class Passes:
    """Runs of one script, one after the other in the same processes.

    Args:
        start: runs the script.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self.notes: list[str] | None = None
        """Changes to the flags in the first run."""

    def read_flags(self) -> Namespace:
        """Return the script's flags, checked and made small, before anything of Megatron has started.

        Raises:
            CannotStartError: the script does not parse them with Megatron's parser, or they leave nothing to examine.
        """

        def stop(_original: Callable[..., Any], args: Namespace, *_: Any, **__: Any) -> Namespace:
            apply(Setting(), args)
            return args

        return self._result_of(stop, _VALIDATE, missing="parse its flags with megatron.training")

    def run(self, setting: Setting, body: Callable[[Training], _Result]) -> _Result:
        """Run ``body`` on what Megatron has built under ``setting``. Every rank of the job runs the same.

        Raises:
            CannotStartError: the script ends, or raises, before it trains.
        """

        def validate(original: Callable[..., Any], args: Namespace, *rest: Any, **options: Any) -> Any:
            notes = apply(setting, args)
            self.notes = notes if self.notes is None else self.notes
            return original(args, *rest, **options)

        def examine(original: Callable[..., Any], *args: Any, **kwargs: Any) -> _Result:
            training = Training.of(original, args, kwargs)
            try:
                return body(training)
            except CannotStartError:
                raise
            except Exception as error:
                raise _CheckError(f"a check failed to run: {quoted(error)}") from error

        return self._result_of(examine, _TRAIN, missing="train with megatron.training's train()", validate=validate)

    def _result_of(
        self,
        body: Callable[..., _Result],
        target: tuple[str, str, tuple[str, ...]],
        *,
        missing: str,
        validate: Callable[..., Any] | None = None,
    ) -> _Result:
        """Run the script to a function of Megatron, call ``body`` instead of it, and reset Megatron's global state.

        Args:
            body: takes the function, and the arguments of the call.
            target: module, name and used parameters of the function.
            missing: what the script must do to come there, as an imperative.
            validate: wrapper of Megatron's check of its flags.
        """
        patches, results = Patches(), []

        def stop(*args: Any, **kwargs: Any) -> None:
            results.append(body(*args, **kwargs))
            raise _ReachedError

        def install() -> None:
            if not has_module("megatron.training"):
                raise CannotStartError(
                    "megatron.training must be importable, got no such module. "
                    "Run a script of a Megatron-LM tree, or install megatron-core 0.19."
                )
            require_symbol(_TRAINING, "destroy_global_state")
            for (module, name, parameters), wrapper in ((_VALIDATE, validate), (target, stop)):
                if wrapper is not None:
                    patches.wrap(module, name, wrapper, parameters=parameters)

        try:
            self._start(install)
        except _ReachedError:
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
        require_symbol(_TRAINING, "destroy_global_state")()
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if not results:
            raise CannotStartError(f"The script must {missing}, got its end before that.")
        return results[0]
