"""Sparse ring attention in Megatron-Core. The only importer of ``megatron.*``."""

from .arguments import add_arguments, config_from_args
from .batch import document_position_ids, packed_seq_params, pad_batch, shard_batch
from .compat import MissingSymbolError
from .core_attention import MTrainingCoreAttention
from .layer_specs import (
    ReplacedSpec,
    get_mtraining_layer_local_spec,
    get_mtraining_layer_with_transformer_engine_spec,
    replace_core_attention,
)
from .recorder import AttentionRecorder, LayerRecord
from .runtime import Runtime, dense_evaluation, destroy, initialize, record_attention, set_training_step

__all__ = [
    "AttentionRecorder",
    "LayerRecord",
    "MTrainingCoreAttention",
    "MissingSymbolError",
    "ReplacedSpec",
    "Runtime",
    "add_arguments",
    "config_from_args",
    "dense_evaluation",
    "destroy",
    "document_position_ids",
    "get_mtraining_layer_local_spec",
    "get_mtraining_layer_with_transformer_engine_spec",
    "initialize",
    "packed_seq_params",
    "pad_batch",
    "record_attention",
    "replace_core_attention",
    "set_training_step",
    "shard_batch",
]
