"""Positions of a model beyond those that it was trained on."""

from __future__ import annotations

from transformers import PretrainedConfig


def stretch_positions(config: PretrainedConfig, length: int) -> int:
    """Set YaRN in ``config`` where a text is longer than its positions; return the factor, 1 where it is not.

    The factor is the least power of two. A model whose positions are stretched already is left as it is where they
    suffice, and stretched from its original ones where they do not.

    Args:
        config: of a model with rotary embeddings, as transformers 5 has them in ``rope_parameters``.
        length: tokens of the text.
    """
    if length <= config.max_position_embeddings:
        return 1
    rope = config.rope_parameters
    original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    factor = 1
    while original * factor < length:
        factor *= 2
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": rope["rope_theta"],
        "factor": float(factor),
        "original_max_position_embeddings": original,
    }
    config.max_position_embeddings = original * factor
    return factor
