"""``--spec megatron_mtraining.megatron.spec gpt``: this attention without any hook in Megatron's parser.

For releases whose ``--spec`` takes a function, core 0.19 and later; :mod:`.spec_object` is for those before. The
configuration comes from the YAML file that ``MTRAINING_CONFIG`` names, else it is the default one. Megatron needs
``--no-create-attention-mask-in-dataloader``. What the launcher does beside: it counts steps, replaces the attention of
prediction layers, meters, and raises an error where text would be generated.
"""

from __future__ import annotations

from typing import Any

from ..config import MTrainingConfig
from ..config_file import config_from_environment
from ..errors import invalid
from .attention import replace_core_attention
from .compat import global_of_training, require_symbol
from .runtime import initialize, is_initialized
from .unsupported import check_arguments

_LAUNCHER = "Start the script with python -m megatron_mtraining and --attention-backend mtraining."


def gpt(config: Any, vp_stage: int | None = None) -> Any:
    """Return the decoder block that Megatron builds from its flags, with this attention. A collective, the first time.

    Args:
        config: a TransformerConfig, or the GPTModelConfig that holds one.
        vp_stage: the virtual pipeline stage.

    Raises:
        ValueError: flags that are unsupported together with this attention.
    """
    transformer = getattr(config, "transformer", config)
    if transformer.mtp_num_layers:
        raise invalid("--mtp-num-layers", "absent with --spec", transformer.mtp_num_layers, _LAUNCHER)
    if not is_initialized():
        chosen = config_from_environment()
        _check_flags(chosen)
        initialize(chosen)
    build = require_symbol("megatron.core.models.gpt.gpt_layer_specs", "get_gpt_decoder_block_spec")
    block = build(
        transformer,
        transformer.transformer_impl == "transformer_engine",
        normalization=transformer.normalization,
        qk_l2_norm=getattr(transformer, "qk_l2_norm", False),
        vp_stage=vp_stage,
    )
    return replace_core_attention(block).spec if block.layer_specs else block


def _check_flags(config: MTrainingConfig) -> None:
    """Check Megatron's flags where it has parsed any."""
    if config.dense_warmup_steps:
        raise invalid("dense_warmup_steps", "0 with --spec", config.dense_warmup_steps, _LAUNCHER)
    args = global_of_training("get_args")
    if args is not None:
        check_arguments(args, config)
