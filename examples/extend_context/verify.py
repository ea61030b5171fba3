"""Transformers and Megatron compared on real text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_mtraining.errors import invalid

from .bridge import MegatronModel

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference of logits over the largest logit: rounding of sums in another order."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference of two implementations of one model."""

    largest_difference: float
    largest_logit: float
    hf_loss: float
    megatron_loss: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"logits within {self.largest_difference:.1e} of {self.largest_logit:.1f} "
            f"on {self.tokens} tokens of real text, loss {self.hf_loss:.4f} and {self.megatron_loss:.4f}"
        )


def real_text(folder: Path, path: str, num_tokens: int) -> torch.Tensor:
    """Return the first tokens ``[1, seq]`` of a text file, by the tokenizer of a Hugging Face folder.

    Raises:
        ValueError: no file, or an empty one.
    """
    from .tokenizer import HuggingFaceTokenizer

    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        raise invalid("model.verify_text", "a text file", f"{path}: {error.strerror}") from error
    tokens = HuggingFaceTokenizer(folder).encode([text[: 16 * num_tokens]])[0][:num_tokens]
    if len(tokens) < 2:
        raise invalid("model.verify_text", "of at least two tokens", f"{len(tokens)} in {path}")
    return torch.tensor([tokens])


def compare(folder: Path, megatron: MegatronModel, tokens: torch.Tensor) -> Comparison:
    """Compare a Hugging Face folder's logits, by transformers, with a Megatron model's.

    Raises:
        ValueError: they differ by more than rounding.
    """
    hf = load_hf(folder)
    dtype = next(hf.parameters()).dtype
    with torch.no_grad():
        expected = hf(tokens.to(hf.device)).logits.float().cpu()
    del hf
    actual = megatron.logits(tokens)[..., : expected.shape[-1]]
    found = Comparison(
        float((expected - actual).abs().max()),
        float(expected.abs().max()),
        _loss(expected, tokens),
        _loss(actual, tokens),
        tokens.shape[1],
    )
    if not found.largest_difference <= TOLERANCE[dtype] * max(found.largest_logit, 1.0):
        raise invalid("Megatron's logits", "those of transformers", str(found), "Report this model's config.json.")
    return found


def load_hf(folder: Path) -> torch.nn.Module:
    """Load a folder in transformers: bfloat16 on a GPU, else float32."""
    from transformers import AutoModelForCausalLM

    has_gpu = torch.cuda.device_count() > 0 and torch.cuda.is_available()
    dtype = torch.bfloat16 if has_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="sdpa")
    return model.to("cuda" if has_gpu else "cpu").eval()


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]))
