"""Transformers and Megatron compared on real text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_mtraining.errors import invalid

from .bridge import MegatronModel

TOLERANCE = 1e-4
"""float32: largest difference of logits over the largest logit, from sums in another order."""

ROUNDING = 2.0
"""bfloat16: Megatron's deviation from float32, root mean square, over transformers' own in bfloat16."""


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

    In bfloat16 both differ from float32 by some per cent of the largest logit, so the judge there is float32: Megatron
    may be :data:`ROUNDING` times as far from it as transformers.

    Raises:
        ValueError: they differ by more than rounding.
    """
    expected = _logits(folder, tokens, dtype=_dtype())
    actual = megatron.logits(tokens)[..., : expected.shape[-1]]
    found = Comparison(
        float((expected - actual).abs().max()),
        float(expected.abs().max()),
        _loss(expected, tokens),
        _loss(actual, tokens),
        tokens.shape[1],
    )
    if _dtype() is torch.float32:
        is_close = found.largest_difference <= TOLERANCE * max(found.largest_logit, 1.0)
    else:
        exact = _logits(folder, tokens, dtype=torch.float32)
        is_close = is_within_rounding(actual, expected, exact)
    if not is_close:
        raise invalid("Megatron's logits", "those of transformers", str(found), "Report this model's config.json.")
    return found


def is_within_rounding(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether ``actual`` is about as near to ``exact`` as ``expected``, which is of the same dtype as it."""

    def deviation(logits: torch.Tensor) -> float:
        return float((logits - exact).square().mean().sqrt())

    return deviation(actual) <= ROUNDING * deviation(expected)  # False for NaN


def load_hf(folder: Path, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Load a folder in transformers, by default in bfloat16 on a GPU, else in float32."""
    from transformers import AutoModelForCausalLM

    dtype = dtype or _dtype()
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="sdpa")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


@torch.no_grad()
def _logits(folder: Path, tokens: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    model = load_hf(folder, dtype)
    return model(tokens.to(model.device)).logits.float().cpu()


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]))
