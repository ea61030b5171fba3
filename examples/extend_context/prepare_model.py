"""``prepare_model``: a Hugging Face model to a folder with the YaRN entry, and to a Megatron checkpoint."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_mtraining.errors import invalid

from .model_folder import extended_config, read_model_config, write_model_folder
from .settings import Settings
from .tokens import write_atomically

RESULT = "prepare_model.json"


def prepare_model(settings: Settings) -> str:
    """Write the extended folder and the Megatron checkpoint, or what is missing of them; return a sentence about them.

    Raises:
        ValueError: no model, one that Bridge would change silently, or logits that differ after the conversion.
    """
    result = Path(settings.output, RESULT)
    config = prepare_folder(settings)
    wanted = {"config": config, "verify": [settings.model.verify_text, settings.model.verify_tokens]}
    before = json.loads(result.read_text()) if result.is_file() else {}
    if before.get("wanted") == wanted and settings.megatron_folder.is_dir():
        return before["sentence"]
    sentence = convert(settings)
    write_atomically(result, json.dumps({"wanted": wanted, "sentence": sentence}))
    return sentence


def prepare_folder(settings: Settings) -> dict:
    """Write the Hugging Face folder with the YaRN entry, unless it is there; return its config.json."""
    source = local_folder(settings)
    config = extended_config(read_model_config(source), settings.model)
    path = settings.model_folder / "config.json"
    if not path.is_file() or json.loads(path.read_text()) != config:
        write_model_folder(source, settings.model_folder, config)
        shutil.rmtree(settings.megatron_folder, ignore_errors=True)
    return config


def local_folder(settings: Settings) -> Path:
    """Return the source's Hugging Face folder: itself, a GGUF file's weights in float32, or the hub's download."""
    source = settings.model.source
    path = Path(source)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        target = Path(settings.output, "source")
        if not (target / "config.json").is_file():
            _dequantise(path, target)
        return target
    if path.exists() or source.count("/") != 1 or source.startswith((".", "/")):
        raise invalid("model.source", "a Hugging Face folder, a .gguf file or a name on the hub", source)
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "merges.txt", "LICENSE*"]
        return Path(snapshot_download(source, allow_patterns=patterns))
    except Exception as error:
        found = f"{source}: {' '.join(str(error).split())[:300]}"
        raise invalid("model.source", "a folder, or a model of a hub in reach", found) from error


def _dequantise(path: Path, target: Path) -> None:
    if not path.is_file():
        raise invalid("model.source", "a .gguf file", f"{path}, which is missing")
    import torch

    from .bridge import quiet

    quiet()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"prepare_model: reading {path}", flush=True)
    options = {"gguf_file": path.name}
    partial = target.with_name("source.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with _read_once():
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
        if not (path.parent / "tokenizer.json").is_file():
            AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(partial)
    # These are of the quantised file, and keep a model from being saved.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.is_quantized, model.hf_quantizer, model.quantization_method = False, None, None
    model.save_pretrained(partial)
    if (path.parent / "tokenizer.json").is_file():  # made before of the same file
        for beside in (*path.parent.glob("tokenizer*.json"), *path.parent.glob("chat_template*")):
            shutil.copyfile(beside, partial / beside.name)
    for licence in path.parent.parent.glob("LICENSE*"):
        shutil.copyfile(licence, partial / licence.name)
    partial.rename(target)


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Keep a GGUF file's fields while transformers asks for them four times: each reading parses 200,000 strings."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def convert(settings: Settings) -> str:
    """Write the Megatron checkpoint of the extended folder, and compare both on real text."""
    from .bridge import MegatronModel, start_megatron
    from .verify import compare, real_text

    start_megatron()
    tokens = real_text(settings.model_folder, settings.model.verify_text, settings.model.verify_tokens)
    model = MegatronModel(settings.model_folder)
    found = compare(settings.model_folder, model, tokens)
    partial = settings.megatron_folder.with_name(settings.megatron_folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save(partial)
    shutil.rmtree(settings.megatron_folder, ignore_errors=True)
    partial.rename(settings.megatron_folder)
    return f"model in {settings.model_folder}, Megatron checkpoint in {settings.megatron_folder}: {found}"
