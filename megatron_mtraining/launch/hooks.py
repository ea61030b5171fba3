"""The one call that makes Megatron know this backend."""

from __future__ import annotations

from ..config import MTrainingConfig
from ..megatron import meter
from ..megatron.compat import MissingSymbolError, has_module, require_symbol
from ..megatron.patching import Patches
from .attention_backend import extend_attention_backend
from .model_hooks import install_generation_hook, install_model_hooks
from .settings import SETTINGS
from .training_hooks import install_group_hooks, install_training_hooks

_PATCHES = Patches()
_INSTANTIATE = "megatron.training.config.instantiate_utils"


def install(config: MTrainingConfig | None = None) -> tuple[str, ...]:
    """Add ``attention_backend=mtraining`` to Megatron, its flags, and the hooks that act once it is chosen.

    Call it before the training script, or Megatron's parser, is imported. Where the backend is not chosen the hooks
    hand every call through. A second call changes nothing but the configuration.

    Args:
        config: for programs that do not parse Megatron's command line, and the defaults of the flags for those that do.
            Default: the file that ``MTRAINING_CONFIG`` names, else the defaults of the dataclass.

    Returns:
        Dotted names of the functions and classes of Megatron that are wrapped.

    Raises:
        MissingSymbolError: this Megatron lacks something that is wrapped; nothing stays wrapped then.
    """
    if config is not None:
        SETTINGS.given = config
    try:
        backend = extend_attention_backend()
        install_model_hooks(_PATCHES, backend)
        install_generation_hook(_PATCHES, backend)
        install_group_hooks(_PATCHES)
        install_training_hooks(_PATCHES, backend)
        _allow_in_yaml()
    except MissingSymbolError:
        uninstall()
        raise
    return _PATCHES.targets


def uninstall() -> None:
    """Take every hook off again, the meter's too, and forget what was chosen; the enum keeps its member."""
    _PATCHES.undo()
    meter.uninstall()
    SETTINGS.given, SETTINGS.args, SETTINGS.model_built = None, None, False


def _allow_in_yaml() -> None:
    """Let ``_target_: megatron_mtraining.MTrainingConfig`` stand in the YAML of Megatron's configuration container."""
    if has_module(_INSTANTIATE):
        require_symbol(_INSTANTIATE, "target_allowlist.add_prefix")("megatron_mtraining.")
