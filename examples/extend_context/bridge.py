"""Megatron models of Hugging Face folders in this process, through Megatron-Bridge, on a GPU or a CPU.

Bridge 0.6.2 imports TransformerEngine whether it is there or not; where it is not, :func:`import_bridge` stands in for
that one import. Its class of adapters for LoRA is all that needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import socket
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.errors import invalid

BRIDGE_VERSION = "0.6.2"
RUN_CONFIG = "run_config.yaml"
"""Bridge's description of a checkpoint's model, which its own commands look for in every ``iter_`` folder."""

TRACKER = "latest_checkpointed_iteration.txt"
"""File that names the latest iteration of a Megatron checkpoint."""

_HOW_TO_INSTALL = f"pip install 'megatron-mtraining[bridge]' && pip install --no-deps megatron-bridge=={BRIDGE_VERSION}"


def is_installed() -> bool:
    """True if Megatron-Bridge is installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("megatron-bridge"))
    return False


def start_megatron(attention: MTrainingConfig | None = None) -> None:
    """Make this process a Megatron job of one rank, with Bridge imported; without a GPU on the CPU.

    Args:
        attention: as for :func:`start_bridge`.

    Raises:
        ValueError: Megatron-Bridge is not installed.
    """
    start_bridge(attention)
    if not torch.distributed.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        address = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(address, MASTER_PORT=str(port))
        torch.distributed.init_process_group("nccl" if _has_gpu() else "gloo")


def start_bridge(attention: MTrainingConfig | None = None, *, for_training: bool = False) -> None:
    """Import Bridge, with what stands in for a GPU where there is none.

    Args:
        attention: configuration of sparse attention for models that are built later; default: Megatron's own attention.
        for_training: whether Bridge's training shall start.

    Raises:
        ValueError: Megatron-Bridge is not installed.
    """
    if sys.version_info[:2] < (3, 12):
        raise invalid("Python", "3.12, as Megatron-Bridge needs", sys.version.split()[0])
    if not is_installed():
        raise invalid("Megatron-Bridge", "installed", "nothing", f"{_HOW_TO_INSTALL}.")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    quiet()
    if not torch.cuda.is_available():
        from torch.utils import _device

        _device._device_constructors()  # torch caches these functions: the originals, not the ones for Megatron
        import transformers  # noqa: F401  (it looks for a GPU when imported)

        from megatron_mtraining.testing import megatron_on_cpu

        megatron_on_cpu.install(for_training=for_training)
    if attention is not None:
        from megatron_mtraining.megatron import install

        install(attention)
    import_bridge()


def quiet() -> None:
    """Leave out what the libraries report while they import and load: hundreds of lines."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _has_gpu() -> bool:
    return torch.cuda.device_count() > 0 and torch.cuda.is_available()


def import_bridge() -> None:
    """Import ``megatron.bridge``, with a stand-in for TransformerEngine during the import where that is missing."""
    if importlib.util.find_spec("transformer_engine") is not None:
        import megatron.bridge

        return
    # First, so that Megatron-Core finds no TransformerEngine.
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.hybrid.hybrid_layer_specs
    import megatron.training

    with _transformer_engine_stand_in():
        import megatron.bridge.peft.lora_layers  # noqa: F401


class _AnyClass(type):
    """Class of classes whose every attribute is such a class: enough for annotations and base classes."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (), {})


class _AnyModule(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (), {})


@contextlib.contextmanager
def _transformer_engine_stand_in() -> Iterator[None]:
    names = ("transformer_engine", "transformer_engine.pytorch")
    version = importlib.metadata.version
    for name in names:
        module = _AnyModule(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    sys.modules[names[0]].pytorch = sys.modules[names[1]]

    def with_stand_in(name: str) -> str:
        return "2.9.0" if name.replace("_", "-") == "transformer-engine" else version(name)

    importlib.metadata.version = with_stand_in
    try:
        yield
    finally:
        importlib.metadata.version = version
        for name in names:
            sys.modules.pop(name, None)


class MegatronModel:
    """A Hugging Face folder's model as Megatron's GPTModel; :func:`start_megatron` comes first.

    Attributes:
        model: the GPTModel.
    """

    def __init__(self, folder: Path, *, load_weights: bool = True, sparse: bool = False) -> None:
        """Build the model of a folder.

        Args:
            folder: a Hugging Face folder with every field of its YaRN entry.
            load_weights: take the folder's weights; else they are undefined, for :meth:`load` to fill.
            sparse: attend as the configuration given to :func:`start_megatron` says.
        """
        from megatron.bridge import AutoBridge
        from megatron.bridge.models.gpt_provider import local_layer_spec
        from megatron.core import parallel_state
        from megatron.core.transformer.enums import AttnBackend

        dtype = torch.bfloat16 if _has_gpu() else torch.float32
        self.folder, self.device = folder, "cuda" if _has_gpu() else "cpu"
        self._bridge = AutoBridge.from_hf_pretrained(str(folder), torch_dtype=dtype)
        provider = self._bridge.to_megatron_provider(load_weights=load_weights)
        if importlib.util.find_spec("transformer_engine") is None:
            provider.transformer_layer_spec, provider.transformer_impl = local_layer_spec, "local"
            provider.persist_layer_norm = provider.masked_softmax_fusion = False
        if not _has_gpu():
            provider.use_cpu_initialization = True
            provider.bias_activation_fusion = provider.bias_dropout_fusion = False
        provider.gradient_accumulation_fusion = provider.apply_rope_fusion = provider.cross_entropy_loss_fusion = False
        provider.params_dtype, provider.bf16, provider.fp16 = dtype, dtype is torch.bfloat16, False
        provider.attention_dropout = provider.hidden_dropout = 0.0
        if sparse:
            provider.attention_backend = AttnBackend["mtraining"]
        provider.finalize()
        if not parallel_state.model_parallel_is_initialized():
            provider.initialize_model_parallel(seed=0)
        options = {"use_cpu_initialization": True, "bf16": False} if not _has_gpu() else {}
        self._models = provider.provide_distributed_model(wrap_with_ddp=False, **options)
        self.model = self._models[0].eval()

    def save(self, target: Path) -> None:
        """Write a Megatron checkpoint without optimizer state: Bridge's, which has its description of the model beside.

        Where packages are missing that Bridge's own training imports, the same weights without that description.
        """
        try:
            importlib.import_module("megatron.bridge.training.model_load_save")
        except ImportError as error:
            print(f"{target} will have no {RUN_CONFIG}, which Bridge's own programs read: {error}.")
            self._save_weights(target)
        else:
            self._bridge.save_megatron_model(self._models, str(target))

    def _save_weights(self, target: Path) -> None:
        from megatron.core import dist_checkpointing

        iteration = target / "iter_0000000"
        iteration.mkdir(parents=True)
        dist_checkpointing.save({"model": self._unwrapped().sharded_state_dict(), "iteration": 0}, str(iteration))
        (target / TRACKER).write_text("0")

    def load(self, iteration: Path) -> None:
        """Take the weights of a checkpoint's ``iter_`` folder, which pretrain_gpt.py or Bridge wrote."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.validation import StrictHandling

        model = self._unwrapped()
        wanted = {"model": model.sharded_state_dict()}
        loaded = dist_checkpointing.load(wanted, str(iteration), strict=StrictHandling.LOG_UNEXPECTED)
        model.load_state_dict(loaded["model"], strict=False)

    def _unwrapped(self) -> torch.nn.Module:
        model = self.model
        while hasattr(model, "module"):
            model = model.module
        return model

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors as transformers has them."""
        yield from self._bridge.export_hf_weights(self._models, cpu=True, show_progress=False)

    def save_hf(self, target: Path, *, shard_bytes: int = 5 << 30) -> None:
        """Write the weights as transformers' safetensors, in files of about ``shard_bytes`` and their index."""
        from safetensors.torch import save_file

        target.mkdir(parents=True)
        shards: list[list[str]] = []
        shard: dict[str, torch.Tensor] = {}

        def end_shard() -> None:
            save_file(shard, str(target / f"{len(shards)}.safetensors"), metadata={"format": "pt"})
            shards.append(list(shard))
            shard.clear()

        total = 0
        for name, tensor in self.hf_weights():
            num_bytes = tensor.numel() * tensor.element_size()
            if shard and sum(t.numel() * t.element_size() for t in shard.values()) + num_bytes > shard_bytes:
                end_shard()
            shard[name] = tensor.contiguous().clone()
            total += num_bytes
        end_shard()
        if len(shards) == 1:
            (target / "0.safetensors").rename(target / "model.safetensors")
            return
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        for number, file in enumerate(files):
            (target / f"{number}.safetensors").rename(target / file)
        index = {name: file for names, file in zip(shards, files, strict=True) for name in names}
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32 logits ``[batch, seq, vocabulary]`` of token numbers ``[batch, seq]``, on the CPU."""
        logits = self._forward(tokens)
        return logits.float().cpu()

    @torch.no_grad()
    def losses(self, tokens: torch.Tensor, *, with_last: bool = False) -> torch.Tensor:
        """Return float32 losses ``[batch, seq - 1]`` of the next tokens of numbers ``[batch, seq]``, on the CPU.

        Args:
            tokens: token numbers.
            with_last: let the last token attend too, as in transformers; the keys that are selected depend on it.
        """
        if with_last:
            return self._forward(tokens, labels=tokens.roll(-1, 1).to(self.device))[:, :-1].float().cpu()
        return self._forward(tokens[:, :-1], labels=tokens[:, 1:].contiguous().to(self.device)).float().cpu()

    def _forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        tokens = tokens.to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        return self.model(tokens, positions, None, labels=labels)


def latest_iteration(checkpoint: Path) -> Path | None:
    """Return the ``iter_`` folder that a checkpoint's tracker names, or None where nothing was saved whole."""
    tracker = checkpoint / TRACKER
    number = tracker.read_text().strip() if tracker.is_file() else ""  # Megatron leaves it empty on a full disk
    folder = checkpoint / f"iter_{int(number):07d}" if number.isdecimal() else None
    return folder if folder is not None and folder.is_dir() else None


def copy_run_config(source: Path, target: Path) -> None:
    """Put Bridge's description of a model beside the weights that pretrain_gpt.py saved, for Bridge's own commands."""
    path = (latest_iteration(source) or source) / RUN_CONFIG
    if path.is_file() and not (target / RUN_CONFIG).exists():
        partial = target / f"{RUN_CONFIG}.partial"
        shutil.copyfile(path, partial)
        os.replace(partial, target / RUN_CONFIG)
