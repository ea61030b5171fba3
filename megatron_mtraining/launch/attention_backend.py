"""``AttnBackend.mtraining``: one more member of Megatron's enum of attention backends."""

from __future__ import annotations

from typing import Any

from ..megatron.compat import require_symbol

NAME = "mtraining"
_ENUMS = "megatron.core.transformer.enums"


def extend_attention_backend() -> Any:
    """Add the member ``mtraining`` to Megatron's ``AttnBackend`` and return it; a second call changes nothing.

    Megatron's parser takes its choices from the members, so call it before the parser is built. The member pickles as
    ``auto``: Megatron stores its arguments in every checkpoint, and one without this package must be able to read them.

    Raises:
        MissingSymbolError: this Megatron has no ``AttnBackend`` with a member ``auto``.
    """
    backends, auto = require_symbol(_ENUMS, "AttnBackend"), require_symbol(_ENUMS, "AttnBackend.auto")
    member = backends.__members__.get(NAME) or _add_member(backends)
    member.__reduce_ex__ = lambda _protocol: (backends, (auto.value,))
    return member


def _add_member(enum: Any) -> Any:
    """Add a member as Python does for each line in the body of an Enum.

    The value is the name, which no later release can give to a member of its own as it could a number.
    """
    member = object.__new__(enum)
    member._name_, member._value_ = NAME, NAME
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    enum._member_names_.append(NAME)
    enum._member_map_[NAME] = member
    enum._value2member_map_[NAME] = member
    type.__setattr__(enum, NAME, member)
    return member
