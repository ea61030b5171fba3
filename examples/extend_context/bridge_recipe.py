"""The run of ``train`` as a program of Megatron-Bridge's own: a recipe in its configuration style, from the same file.

    torchrun --nproc-per-node 8 -m examples.extend_context.bridge_recipe --config extend.yaml [section.key=value ...]

``prepare_model`` and ``prepare_data`` come first. Checkpoints are where ``train`` would write them, so that ``export``
finds them. What ``train.flags`` says of pretrain_gpt.py is not read; what it says of this package is.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .bridge import start_bridge
from .held_out import attention_config
from .launch_config import checkpoint_folder, devices
from .prepare_data import data_paths
from .settings import Settings, read_settings

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


def recipe(settings: Settings) -> ConfigContainer:
    """Return Bridge's configuration of the run; :func:`start_bridge` comes first."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.core.transformer.enums import AttnBackend

    train = settings.train
    config = _pretrain_common()
    model = config.model = AutoBridge.from_hf_pretrained(str(settings.model_folder)).to_megatron_provider(
        load_weights=False
    )
    model.attention_backend = AttnBackend["mtraining"]
    model.attention_dropout = model.hidden_dropout = 0.0
    model.context_parallel_size = train.ranks
    model.seq_length = config.dataset.seq_length = train.seq_length
    model.recompute_granularity, model.recompute_method, model.recompute_num_layers = "full", "uniform", 1
    model.calculate_per_token_loss = True
    # The first is apex's, and YaRN has no fused rotation.
    model.gradient_accumulation_fusion = model.apply_rope_fusion = model.cross_entropy_loss_fusion = False

    config.dataset.data_path, config.dataset.split = data_paths(settings.data_folder, "train"), "1,0,0"
    config.dataset.random_seed = config.rng.seed = train.seed
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", model.vocab_size - 1
    config.train.train_iters, config.train.micro_batch_size = train.steps, 1
    config.train.global_batch_size = train.global_batch_size
    config.validation.eval_iters = 0
    config.optimizer.lr, config.optimizer.min_lr = train.learning_rate, train.min_learning_rate
    config.optimizer.weight_decay = train.weight_decay
    config.scheduler.start_weight_decay = config.scheduler.end_weight_decay = train.weight_decay
    config.scheduler.lr_warmup_iters, config.logger.log_interval = train.warmup_steps, 1
    config.logger.tensorboard_dir = None
    config.ddp.average_in_collective = False  # losses are summed over tokens
    config.checkpoint.pretrained_checkpoint = str(settings.megatron_folder)
    config.checkpoint.save = config.checkpoint.load = str(checkpoint_folder(settings))
    config.checkpoint.save_interval = train.save_every
    if not devices()["has_gpu"]:
        _use_cpu(config)
    return config


def _use_cpu(config: ConfigContainer) -> None:
    """Change what a CPU has not: TransformerEngine's layers, fused operators, bfloat16, NCCL."""
    import torch
    from megatron.bridge.models.gpt_provider import local_layer_spec

    model = config.model
    model.transformer_layer_spec, model.transformer_impl = local_layer_spec, "local"
    model.use_cpu_initialization = True
    model.bias_activation_fusion = model.bias_dropout_fusion = model.masked_softmax_fusion = False
    model.persist_layer_norm = model.bf16 = False
    model.recompute_granularity = model.recompute_method = model.recompute_num_layers = None
    model.params_dtype, model.cuda_graph_impl = torch.float32, "none"
    config.mixed_precision, config.dataset.num_workers = None, 0
    config.dist.distributed_backend = "gloo"
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = False
    config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = False
    config.optimizer.bf16 = config.optimizer.use_precision_aware_optimizer = False


def main(arguments: list[str] | None = None) -> None:
    """Train."""
    parser = argparse.ArgumentParser(prog="python -m examples.extend_context.bridge_recipe", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("changes", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    settings = read_settings(options.config, tuple(options.changes))
    start_bridge(attention_config(settings), for_training=True)
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(recipe(settings), forward_step)


if __name__ == "__main__":
    main()
