"""A program of Megatron-Bridge's with this attention, as docs/extend_context.md has it, on CPU ranks.

``torchrun bridge_program.py MODEL CHECKPOINT`` trains two steps on mock data with the checkpoint's weights and prints
Megatron's log. ``nvidia_resiliency_ext``, which Bridge's training imports unasked, is stood in for where it is missing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

import torch
from torch.utils import _device


def main(folder: str, checkpoint: str) -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _device._device_constructors()
    import transformers  # noqa: F401

    from examples.extend_context import bridge
    from megatron_mtraining import MTrainingConfig
    from megatron_mtraining import megatron as mtraining
    from megatron_mtraining.testing import megatron_on_cpu

    megatron_on_cpu.install(for_training=True)
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        for name in ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess"):
            module = bridge._AnyModule(name)
            module.__path__, module.__version__ = [], "0.0.1"
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
        sys.modules["nvidia_resiliency_ext"].inprocess = sys.modules["nvidia_resiliency_ext.inprocess"]

    mtraining.install(MTrainingConfig(dense_below=0, sink_tokens=4, local_blocks=2))
    bridge.import_bridge()
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core.transformer.enums import AttnBackend

    config = _pretrain_common()
    model = config.model = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=False)
    model.attention_backend = AttnBackend["mtraining"]
    model.attention_dropout = model.hidden_dropout = 0.0
    model.context_parallel_size = int(os.environ["WORLD_SIZE"])
    model.seq_length = config.dataset.seq_length = 512
    config.checkpoint.pretrained_checkpoint = checkpoint
    config.checkpoint.save = config.checkpoint.load = None

    # What a CPU has not, and a short run of the folder's vocabulary.
    model.transformer_layer_spec, model.transformer_impl = local_layer_spec, "local"
    model.use_cpu_initialization = True
    for fusion in "gradient_accumulation rope bias_activation bias_dropout masked_softmax".split():
        setattr(model, {"rope": "apply_rope_fusion"}.get(fusion, f"{fusion}_fusion"), False)
    model.persist_layer_norm = model.cross_entropy_loss_fusion = model.bf16 = False
    model.params_dtype, model.cuda_graph_impl = torch.float32, "none"
    config.mixed_precision = None
    config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model = "NullTokenizer", None
    config.tokenizer.vocab_size = model.vocab_size - 1
    config.dataset.num_workers = 0
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 2, 2, 1
    config.validation.eval_iters, config.scheduler.lr_warmup_iters = 0, 1
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    config.dist.distributed_backend = "gloo"
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = config.ddp.average_in_collective = False
    config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = False
    config.optimizer.bf16 = config.optimizer.use_precision_aware_optimizer = False
    pretrain(config, forward_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
