"""Hooks that give Megatron this backend: ``--attention-backend mtraining``, its flags and its attention."""

from __future__ import annotations

import functools
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from ..arguments import BACKEND, add_arguments, config_from_args
from ..config import MTrainingConfig
from ..errors import InvalidError
from ..ranks import is_first_rank
from . import meter
from .attention import replace_core_attention
from .compat import MissingSymbolError, Patches, arguments_of, has_module, models, require_symbol
from .runtime import current_runtime, destroy, initialize, is_initialized, process, set_training_step
from .unsupported import SHARING, check, check_arguments

_ENUMS = "megatron.core.transformer.enums"
_GENERATION = "megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper"
_ARGUMENTS, _TRAINING = "megatron.training.arguments", "megatron.training.training"
_STATE = "megatron.core.parallel_state"
_INSTANTIATE = "megatron.training.config.instantiate_utils"


class UsageError(InvalidError):
    """Error for an impossible request; the launcher shows the message alone."""


def install(
    config: MTrainingConfig | None = None, *, prepare_parser: Callable[[ArgumentParser], Any] | None = None
) -> tuple[str, ...]:
    """Add ``attention_backend=mtraining`` to Megatron, its flags, and the hooks that act once it is chosen.

    Call it before the training script, or Megatron's parser, is imported. Where the backend is not chosen every call
    reaches Megatron unchanged. A second call changes nothing but the configuration. This is all that is replaced:

    ``AttnBackend`` gets one member more, from which Megatron makes the choices of its parser and the help of its flags.
    It pickles as ``auto``, so that a stock Megatron reads the checkpoints (docs/decisions/0010).

    The constructors of ``GPTModel`` and ``HybridModel`` (``MambaModel`` in core 0.16 and 0.17) get copies of their
    layer specs with this attention, and make the ring's groups first. All specs end there, whoever made them: the
    functions and providers that make specs are not replaced, because a dozen places name their attention directly.

    The constructor of ``AbstractModelInferenceWrapper``, which every engine that generates text calls, raises an error:
    engines attend without ``core_attention``, so this attention would be ignored. Nothing of inference is replaced.

    ``initialize_model_parallel`` calls :func:`~megatron_mtraining.megatron.initialize` after it, and
    ``destroy_model_parallel`` calls :func:`~megatron_mtraining.megatron.destroy` before it. Groups and their order are
    Megatron's.

    ``add_megatron_arguments`` adds the flags ``--mtraining-*``. ``validate_args`` checks all flags against
    :mod:`.unsupported` after Megatron's own checks, and drops a dataloader's mask that would be the causal one.
    ``--yaml-cfg`` is not replaced: it starts in no supported release. Configuration files of later releases may name
    this package's classes (``target_allowlist``).

    ``train_step`` and ``evaluate_and_print_results`` count the steps, which dense warm-up depends on. The training
    loop, the optimizer, checkpoints and pipeline schedules are not replaced.

    Once the backend is chosen, ``num_floating_point_operations`` and ``training_log`` add the meter's line to
    Megatron's log (:mod:`.meter`); Megatron's own numbers remain.

    From ``initialize`` to ``destroy``, in any layout: ``GPTModel.forward`` and ``HybridModel.forward`` check the length
    of the batch and find its padding for the layers; ``get_batch_on_this_cp_rank``, ``get_thd_batch_on_this_cp_rank``
    and ``get_batch_on_this_tp_rank`` count it, each where the release has it (:mod:`.micro_batch`).

    From ``initialize`` to ``destroy``, on several context-parallel ranks in a layout other than Megatron's ``zigzag``,
    these follow the layout:

    ``_get_batch_on_this_cp_rank_per_sequence_balancing`` and ``_get_batch_on_this_cp_rank_per_document_balancing`` cut
    batches and packs behind ``get_batch_on_this_cp_rank``; ``get_pretrain_batch_on_this_cp_rank`` and
    ``get_sft_batch_on_this_cp_rank`` in releases before; that function itself, ``get_thd_batch_on_this_cp_rank`` and
    ``get_batch_on_this_hybrid_cp_rank``, which raises an error, in core 0.16. ``thd_get_partitioned_indices`` of
    TransformerEngine is where models cut packs themselves. A pack is split as a whole, never document by document.

    ``get_pos_emb_on_this_cp_rank`` and ``_apply_rotary_pos_emb_thd`` cut rotary tables, whose caches are emptied then
    and at the end (:mod:`.split`). Fused rotary kernels are not replaced: they compute Megatron's split, so packs on
    several ranks need ``--no-rope-fusion``.

    ``roll_tensor`` shifts the tokens of multi-token prediction (:mod:`.split`). The mixing of hidden states
    (``mtp_hsm``) is not replaced: it is unsupported, as are hybrid context parallelism and logits stored by rank.

    ``_undo_attention_load_balancing`` and ``_redo_attention_load_balancing`` of Mamba layers, and
    ``_build_thd_cp_a2a_perm`` of gated delta layers, order tokens for a scan (:mod:`.split`). The scans themselves are
    Megatron's.

    Args:
        config: for programs that do not parse Megatron's command line, and the defaults of the flags for those that do.
            Default: the file that ``MTRAINING_CONFIG`` names, else the defaults of the dataclass.
        prepare_parser: called with Megatron's parser once it has all flags.

    Returns:
        Dotted names of the functions and classes of Megatron that are wrapped.

    Raises:
        MissingSymbolError: this Megatron has no function of a name that is wrapped; nothing remains wrapped then.
    """
    state = process()
    if config is not None:
        state.given = config
    hooks = state.hooks
    try:
        backend = extend_attention_backend()
        for module_name, name, specs in models():
            build = functools.partial(_build, name, specs, backend)
            hooks.wrap(module_name, f"{name}.__init__", build, parameters=("config", *specs))
        install_generation_hook(hooks, backend)
        hooks.wrap(_STATE, "initialize_model_parallel", _initialize_model_parallel)
        hooks.wrap(_STATE, "destroy_model_parallel", _destroy_model_parallel)
        if has_module("megatron.training"):
            add = functools.partial(_add_megatron_arguments, prepare_parser)
            hooks.wrap(_ARGUMENTS, "add_megatron_arguments", add, parameters=("parser",))
            hooks.wrap(_ARGUMENTS, "validate_args", functools.partial(_validate_args, backend), parameters=("args",))
            hooks.wrap(_TRAINING, "train_step", _train_step, parameters=("iteration",))
            hooks.wrap(_TRAINING, "evaluate_and_print_results", _evaluate, parameters=("iteration",))
        if has_module(_INSTANTIATE):  # so that its YAML may name ``_target_: megatron_mtraining.MTrainingConfig``
            require_symbol(_INSTANTIATE, "target_allowlist.add_prefix")("megatron_mtraining.")
    except MissingSymbolError:
        uninstall()
        raise
    return hooks.targets


def uninstall() -> None:
    """Remove every hook, the meter's too, and reset what was chosen; the enum retains its member."""
    state = process()
    state.hooks.undo()
    meter.uninstall()
    state.given, state.args, state.model_built = None, None, False


def _print_once(sentence: str) -> None:
    """Print ``sentence`` on the first rank, once in the life of the process."""
    if is_first_rank() and sentence not in process().printed:
        print(f"mtraining: {sentence}", flush=True)
    process().printed.add(sentence)


def extend_attention_backend() -> Any:
    """Add the member ``mtraining`` to Megatron's ``AttnBackend`` and return it; a second call changes nothing.

    Megatron's parser takes its choices from the members, so call it before the parser is built.

    Raises:
        MissingSymbolError: this Megatron has no ``AttnBackend`` with a member ``auto``.
    """
    backends, auto = require_symbol(_ENUMS, "AttnBackend"), require_symbol(_ENUMS, "AttnBackend.auto")
    member = backends.__members__.get(BACKEND) or _add_member(backends)
    member.__reduce_ex__ = lambda _protocol: (backends, (auto.value,))
    return member


def _add_member(enum: Any) -> Any:
    """Add a member as Python does for each line in the body of an Enum.

    The value is the name, which no later release can give to a member of its own as it could a number.
    """
    member = object.__new__(enum)
    member._name_, member._value_ = BACKEND, BACKEND
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    enum._member_names_.append(BACKEND)
    enum._member_map_[BACKEND] = member
    enum._value2member_map_[BACKEND] = member
    type.__setattr__(enum, BACKEND, member)
    return member


def _build(
    model: str, specs: tuple[str, ...], backend: Any, original: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Call the constructor ``original`` of a model; make groups, layout and copies of its ``specs`` first."""
    call = inspect.signature(original).bind(*args, **kwargs)
    config = call.arguments["config"]
    if config.attention_backend is backend:
        ensure_runtime()
        check(SHARING, given=config, config=current_runtime().config)
        for name in filter(call.arguments.__contains__, specs):
            call.arguments[name] = sparse_spec(call.arguments[name], f"{model}'s {name}")
    original(*call.args, **call.kwargs)


def sparse_spec(spec: Any, name: str) -> Any:
    """Copy the layer spec ``spec`` with this attention and print that once; return a ``spec`` without layers itself.

    Raises:
        ValueError: layers without a causal self attention.
    """
    process().model_built = True
    block = getattr(spec, "submodules", None) or spec
    # A pipeline stage may hold no layer, or a model no prediction layers.
    if spec is None or getattr(block, "layer_specs", None) == []:
        return spec
    sparse, num_replaced, others = replace_core_attention(spec)
    beside = f", beside {', '.join(others)}" if others else ""
    _print_once(f"{num_replaced} core_attention of {name} replaced{beside}.")
    return sparse


def install_generation_hook(patches: Patches, backend: Any) -> None:
    """Wrap the constructor of what generates text with a model.

    Raises:
        MissingSymbolError: this Megatron generates text in another way.
    """
    generate = functools.partial(_generate, backend)
    patches.wrap(_GENERATION, "AbstractModelInferenceWrapper.__init__", generate, parameters=("model",))


def _generate(backend: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call the constructor ``original`` of a text generator.

    Raises:
        UsageError: the model asks for this backend, which would be ignored.
    """
    model = arguments_of(original, args, kwargs)["model"]
    config = require_symbol("megatron.core.utils", "get_model_config")(model)
    if config.attention_backend is backend:
        if not getattr(process().args, "perform_rl_step", False):
            raise UsageError(
                "--attention-backend must be another to generate text, got mtraining. "
                "This is attention for training; its checkpoints load without it."
            )
        _print_once("rollouts are generated with Megatron's own attention to every key; training attends sparsely.")
    original(*args, **kwargs)


def _initialize_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)
    if process().args is not None:
        ensure_runtime()


def _destroy_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    destroy()
    original(*args, **kwargs)


def ensure_runtime() -> None:
    """Prepare groups and layout by the configuration of this run.

    A collective over all ranks, the first time. A program without Megatron's flags may have done so itself.
    """
    args = process().args
    if args is None and is_initialized():
        return
    runtime = initialize(process().config())
    _print_once(f"{runtime.config}, {runtime.cp_group.size()} context-parallel ranks, {runtime.inner_size} in a node.")


def _add_megatron_arguments(
    prepare_parser: Callable[[ArgumentParser], Any] | None,
    original: Callable[..., ArgumentParser],
    parser: ArgumentParser,
) -> ArgumentParser:
    try:
        defaults = process().defaults()
    except ValueError as error:  # of the file that MTRAINING_CONFIG names
        raise UsageError(str(error)) from error
    parser = add_arguments(original(parser), defaults=defaults)
    actions = (action for action in parser._actions if action.option_strings)
    process().flags = {action.dest: max(action.option_strings, key=len) for action in actions}
    if prepare_parser is not None:
        prepare_parser(parser)
    return parser


def _validate_args(backend: Any, original: Callable[..., Any], args: Namespace, *rest: Any, **options: Any) -> Any:
    validated = original(args, *rest, **options)
    choose(args, backend)
    return validated


def choose(args: Namespace, backend: Any) -> None:
    """Record whether ``args``, Megatron's validated arguments, choose this backend, and check them if so.

    Raises:
        UsageError: a flag's value out of its range, or unsupported flags.
    """
    process().args = args if args.attention_backend is backend else None
    if process().args is None:
        _print_once(f"nothing is replaced: --attention-backend is {args.attention_backend.name}, not mtraining.")
        return
    if getattr(args, "create_attention_mask_in_dataloader", False) and not args.reset_attention_mask:
        args.create_attention_mask_in_dataloader = False  # a mask of seq x seq that would only be the causal one
        _print_once("--no-create-attention-mask-in-dataloader is set: attention is causal without a mask.")
    try:
        config = config_from_args(args)
        check_arguments(args, config)
    except ValueError as error:
        raise UsageError(str(error)) from error
    meter.install()


def _train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a step of training: count the steps done before and after it, as a resumed run does too."""
    iteration = arguments_of(original, args, kwargs).get("iteration")
    count_step(iteration)
    result = original(*args, **kwargs)
    count_step(iteration, done=1)
    return result


def _evaluate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an evaluation, which a run may begin with."""
    count_step(arguments_of(original, args, kwargs).get("iteration"))
    return original(*args, **kwargs)


def count_step(iteration: int | None, *, done: int = 0) -> None:
    """Record that ``iteration + done`` steps are done; do nothing without a runtime, or where Megatron counts none.

    Raises:
        UsageError: the backend is chosen and no model asked for it, so that all attention would be Megatron's own.
    """
    if process().args is not None and not process().model_built:
        raise UsageError(
            "--attention-backend must be another for a script without GPTModel and HybridModel, got mtraining. "
            "Only their attention is replaced."
        )
    if iteration is not None and is_initialized():
        set_training_step(iteration + done)
