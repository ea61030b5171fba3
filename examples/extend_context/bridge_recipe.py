"""The run of ``train`` as a program of Megatron-Bridge's own: a recipe in its configuration style, from the same file.

    torchrun --nproc-per-node 8 -m examples.extend_context.bridge_recipe --config extend.yaml [section.key=value ...]

``prepare_model`` and ``prepare_data`` come first. Checkpoints are where ``train`` would write them, so that ``export``
finds them. Of ``train.flags``, this package's are read; those of pretrain_gpt.py have no meaning here.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .bridge import start_bridge
from .held_out import attention_config
from .launch_config import checkpoint_folder, devices, launch_config
from .prepare_data import data_paths
from .settings import Settings, read_settings
from .train import write_launch_config

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


def recipe(settings: Settings, *, is_sparse: bool, has_gpu: bool) -> ConfigContainer:
    """Return Bridge's configuration of the run; :func:`start_bridge` comes first.

    Args:
        settings: of all commands.
        is_sparse: attend as the configuration given to :func:`start_bridge` says, else as Bridge's model does.
        has_gpu: whether the ranks are GPUs, else CPU processes.
    """
    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.recipes.utils.dataset_utils import get_blend_fields_from_data_paths
    from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
    from megatron.core.transformer.enums import AttnBackend

    train = settings.train
    config = _pretrain_common()
    model = AutoBridge.from_hf_pretrained(str(settings.model_folder)).to_megatron_provider(load_weights=False)
    config.model = model
    if is_sparse:
        model.attention_backend = AttnBackend["mtraining"]
    model.attention_dropout = model.hidden_dropout = 0.0
    model.context_parallel_size = train.ranks
    model.seq_length = config.dataset.seq_length = train.seq_length
    model.recompute_granularity, model.recompute_method, model.recompute_num_layers = "full", "uniform", 1
    # The first is apex's, and YaRN has no fused rotation.
    model.gradient_accumulation_fusion = model.apply_rope_fusion = model.cross_entropy_loss_fusion = False
    # Losses are summed over tokens.
    model.calculate_per_token_loss, config.ddp.average_in_collective = True, False

    paths = [data_paths(settings.data_folder, part) for part in ("train", "held_out")]
    blend = get_blend_fields_from_data_paths(train_data_path=paths[0], valid_data_path=paths[1] or paths[0])
    config.dataset.blend, config.dataset.blend_per_split, config.dataset.split = blend
    config.dataset.path_to_cache = str(settings.run_folder / "data_cache")
    config.dataset.random_seed = config.rng.seed = train.seed
    # The prepared data are numbers of tokens: training needs their count only.
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", model.vocab_size
    config.tokenizer.use_tokenizer_vocab_size = False

    config.optimizer, config.scheduler = distributed_fused_adam_with_cosine_annealing(
        max_lr=train.learning_rate,
        min_lr=train.min_learning_rate,
        lr_warmup_iters=train.warmup_steps,
        weight_decay=train.weight_decay,
        start_weight_decay=train.weight_decay,
        end_weight_decay=train.weight_decay,
    )
    config.train.train_iters, config.train.global_batch_size = train.steps, train.global_batch_size
    config.train.micro_batch_size, config.validation.eval_iters = 1, 0
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    config.checkpoint.pretrained_checkpoint = str(settings.megatron_folder)
    config.checkpoint.save = config.checkpoint.load = str(checkpoint_folder(settings))
    config.checkpoint.save_interval = train.save_every
    if not has_gpu:
        use_cpu(config)
    return config


def use_cpu(config: ConfigContainer) -> None:
    """Replace what a CPU does not have: TransformerEngine's layers, fused operators, bfloat16 and NCCL."""
    import torch
    from megatron.bridge.models.gpt_provider import local_layer_spec

    model = config.model
    model.transformer_layer_spec, model.transformer_impl = local_layer_spec, "local"
    model.use_cpu_initialization, model.cuda_graph_impl = True, "none"
    model.bias_activation_fusion = model.bias_dropout_fusion = model.masked_softmax_fusion = False
    model.persist_layer_norm = model.bf16 = config.optimizer.bf16 = False
    model.recompute_granularity = model.recompute_method = model.recompute_num_layers = None
    model.params_dtype, config.mixed_precision = torch.float32, None
    config.dataset.num_workers, config.dist.distributed_backend = 0, "gloo"
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = False
    config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = False


def main(arguments: list[str] | None = None) -> None:
    """Train."""
    parser = argparse.ArgumentParser(prog="python -m examples.extend_context.bridge_recipe", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("changes", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    settings, machine = read_settings(options.config, tuple(options.changes)), devices()
    # Of pretrain_gpt.py, but export reads there which attention a run was trained with.
    settings.run_folder.mkdir(parents=True, exist_ok=True)
    write_launch_config(settings.run_folder / "launch.yaml", launch_config(settings, **machine))
    attention = attention_config(settings)
    start_bridge(attention, for_training=True)
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(recipe(settings, is_sparse=attention is not None, has_gpu=machine["has_gpu"]), forward_step)


if __name__ == "__main__":
    main()
