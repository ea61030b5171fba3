"""Sparse ring attention in Megatron-Core. The only importer of ``megatron.*``.

On every rank, around what a Megatron training script does anyway::

    parallel_state.initialize_model_parallel(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2])
    runtime = initialize(config)                                          # before a model is built
    model = GPTModel(transformer_config, get_mtraining_layer_local_spec(), ...)
    layout = SequenceLayout(runtime.config.layout, seq_len=4096, cp_size=4, node_size=runtime.inner_size)
    batch = shard_batch(whole_batch, layout, parallel_state.get_context_parallel_rank())
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

Give the TransformerConfig ``attention_dropout=0.0`` and, when the loss mask is not the same everywhere,
``calculate_per_token_loss=True``: else each rank divides by its own number of tokens.
"""

from ..arguments import add_arguments, config_from_args
from .attention import (
    MTrainingCoreAttention,
    ReplacedSpec,
    get_mtraining_layer_local_spec,
    get_mtraining_layer_with_transformer_engine_spec,
    replace_core_attention,
)
from .compat import MissingSymbolError
from .documents import document_position_ids, packed_seq_params, pad_batch
from .hooks import install, uninstall
from .runtime import (
    AttentionRecorder,
    LayerRecord,
    Runtime,
    dense_evaluation,
    destroy,
    initialize,
    is_initialized,
    record_attention,
    set_training_step,
    shard_batch,
)

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
    "install",
    "is_initialized",
    "packed_seq_params",
    "pad_batch",
    "record_attention",
    "replace_core_attention",
    "set_training_step",
    "shard_batch",
    "uninstall",
]
