"""A Hugging Face folder: its tokenizer, its model, and what both make of a sample."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import hf
from ..config import MTrainingConfig
from ..errors import InvalidError, invalid
from .benchmarks import score
from .sample import Sample
from .texts import measure

CHUNK = 4096
"""Tokens whose logits exist at a time."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def load_tokenizer(folder: Path) -> object:
    """Return the tokenizer of a folder.

    Raises:
        ValueError: the folder has none.
    """
    from transformers import AutoTokenizer

    remedy = "Give --tokenizer a folder with one."
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers may make up an empty one
        raise invalid("the tokenizer", f"in the model's folder, as {_TOKENIZER_FILES[0]}", f"none in {folder}", remedy)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise invalid("the tokenizer", "one that transformers reads", f"{folder}: {error}", remedy) from None


def load_config(folder: Path, samples: Sequence[Sample], *, stretch: bool) -> tuple[object, int]:
    """Return the configuration of a model for ``samples``, and by how much its positions are stretched.

    Raises:
        ValueError: there is no model, or its positions do not suffice.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise invalid("MODEL", "a Hugging Face folder, with config.json", folder)
    config = AutoConfig.from_pretrained(folder)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = max(sample.length for sample in samples)  # decides the factor: longer prompts do not change it for others
    longest = max(samples, key=lambda sample: len(sample.tokens) + sample.max_new_tokens)
    num_tokens = len(longest.tokens) + longest.max_new_tokens
    if positions is None or max(length, num_tokens) <= positions:
        return config, 1
    if length <= positions:
        tokens = f"whose prompt and answer of {num_tokens} tokens pass the {positions} positions"
        remedy = "Give a lower one, or leave it out of --tasks."
        raise invalid("--lengths", f"lower for {longest.benchmark}, {tokens} of {folder.name}", longest.length, remedy)
    if not stretch:
        remedy = "Lower --lengths, or give --stretch-positions: YaRN, which the model was not trained with."
        raise invalid("--lengths", f"at most {positions}, the positions of {folder.name}", length, remedy)
    if not getattr(config, "rope_parameters", None) or "rope_theta" not in config.rope_parameters:
        raise InvalidError(
            f"unsupported: --stretch-positions with {folder.name}, without one rope_theta for all layers."
        )
    factor = hf.stretch_positions(config, length)
    config.max_position_embeddings = max(config.max_position_embeddings, num_tokens)
    return config, factor


@dataclass(slots=True)
class Evaluated:
    """A model that is evaluated."""

    name: str
    model: nn.Module
    tokenizer: object | None
    """Read where answers are decoded."""

    own: MTrainingConfig
    """Configuration of the inference ``mtraining``."""

    facts: dict[str, object]
    """Facts that decide the results: files, positions, dtype, device."""

    @classmethod
    def load(
        cls, folder: Path, config: object, tokenizer: object | None, own: MTrainingConfig | None, *, device: str
    ) -> Evaluated:
        """Load a folder; weights are bfloat16 on a GPU, float32 on a CPU.

        Args:
            folder: a Hugging Face folder.
            config: of the model, from :func:`load_config`.
            tokenizer: of transformers.
            own: configuration of the inference ``mtraining``. Default: the one saved with the model.
            device: where it runs.

        Raises:
            ValueError: the model cannot be loaded, does not fit the device, or its logits are not those of an output
                embedding.
        """
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        if own is None:
            saved = getattr(config, "mtraining", None) or {}
            own = MTrainingConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, attn_implementation=hf.NAME
            ).to(device)
        except torch.OutOfMemoryError:
            raise invalid("MODEL", f"small enough for the memory of {device}", folder) from None
        except (OSError, ValueError) as error:
            raise invalid("MODEL", "a folder with a causal language model", f"{folder}: {error}") from None
        facts = {
            "files": _digest(folder),
            "rope": repr(getattr(config, "rope_parameters", None)),
            "dtype": str(dtype).removeprefix("torch."),
            "device": torch.device(device).type,
        }
        loaded = cls(folder.resolve().name, model.eval(), tokenizer, own, facts)
        loaded._check_logits()
        return loaded

    @torch.no_grad()
    def evaluate(self, sample: Sample, config: MTrainingConfig) -> dict[str, object]:
        """Return what is stored of a sample: ``value``, density of the prefill, and more by benchmark."""
        hf.configure(self.model, config)
        metrics = hf.LayerMetrics()
        if sample.max_new_tokens:
            generated = self.tokenizer.decode(self._generate(sample, metrics), skip_special_tokens=True)
            result = {"value": score(sample, generated), "generated": generated}
        else:
            result = measure(sample, self._losses(sample.tokens, metrics))
        densities = list(metrics.density.values())
        # Layers that run the model's own attention have none.
        return result | {"density": sum(densities) / len(densities) if densities else None}

    def _input(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(np.asarray(tokens, dtype=np.int64)[None], device=self.model.device)

    def _generate(self, sample: Sample, metrics: hf.LayerMetrics) -> list[int]:
        """Return the likeliest tokens, up to one that ends a text."""
        last = {"logits_to_keep": 1, "use_cache": True}
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        with hf.observe(metrics):
            output = self.model(input_ids=self._input(sample.tokens), **last)
        parameters = inspect.signature(self.model.forward).parameters
        cache = "cache" if "cache" in parameters else "past_key_values"  # the name before transformers 5.24
        found: list[int] = []
        while True:
            token = int(output.logits[0, -1].argmax())
            if token in ends:
                return found
            found.append(token)
            if len(found) == sample.max_new_tokens:
                return found
            output = self.model(input_ids=self._input([token]), **{cache: getattr(output, cache)}, **last)

    def _losses(self, tokens: Sequence[int], metrics: hf.LayerMetrics) -> np.ndarray:
        """Return ``[tokens - 1]`` float32: nats of each token after the first."""
        ids = self._input(tokens)
        with hf.observe(metrics):
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        labels = ids[0, 1:]
        parts = [
            F.cross_entropy(self._logits(hidden[here]).float(), labels[here], reduction="none")
            for here in (slice(start, start + CHUNK) for start in range(0, len(labels), CHUNK))
        ]
        return torch.cat(parts).cpu().numpy()

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden)
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Raise where the model scales its logits in another form than :meth:`_logits`."""
        ids = self._input([0, 1, 2, 3])
        hf.configure(self.model, MTrainingConfig(pattern="dense"))
        expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
        found = self._logits(self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]).float()
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
            kind = type(self.model).__name__
            raise InvalidError(
                f"unsupported: mtraining evaluate with {kind}, which changes the logits of its embedding."
            )


def _digest(folder: Path) -> str:
    """Return a key of weights and configuration: sizes, and 16 spots of each file."""
    state = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        state.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(16):
                state.update(os.pread(file.fileno(), 2**16, size * i // 16))
    return state.hexdigest()[:16]
