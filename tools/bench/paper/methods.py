"""The systems of the MTraining paper's comparison as this package runs them, a row each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.errors import invalid

OURS = MTrainingConfig.algorithm_1(layout="striped", schedule="hierarchical", dense_below=0)
"""Algorithm 1 of the paper, in its layout and schedule; every sequence is sparse."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to attend over a ring of ranks."""

    name: str
    paper: str
    """Counterpart in the paper, or why it stands beside it."""

    config: MTrainingConfig | None
    """Selection, layout and schedule; None for TransformerEngine, which has its own."""

    @property
    def is_replayed(self) -> bool:
        """True if its steps are timed one by one and compared with a replay of its index."""
        config = self.config
        return config is not None and config.pattern == "vertical_slash" and config.index_sharing == "head"

    @property
    def layout(self) -> str:
        """Layout of its tokens."""
        return "zigzag" if self.config is None else self.config.layout


METHODS = (
    Method(name="mtraining", paper="MTraining", config=OURS),
    Method(name="w/ ZigZag", paper="MTraining w/ ZigZag", config=replace(OURS, layout="zigzag")),
    Method(name="w/o hierarchical", paper="MTraining w/o Hier.", config=replace(OURS, schedule="flat")),
    Method(name="node_striped", paper="not there: even over steps too", config=replace(OURS, layout="node_striped")),
    Method(name="kv_group index", paper="not there: a list a group", config=replace(OURS, index_sharing="kv_group")),
    Method(name="MoBA", paper="MoBA", config=replace(OURS, pattern="moba")),
    Method(name="XAttention", paper="XAttention", config=replace(OURS, pattern="xattention")),
    Method(name="dense", paper="Dense, ring attention", config=replace(OURS, pattern="dense", layout="zigzag")),
    Method(name="TransformerEngine p2p", paper="Dense, as Megatron trains it", config=None),
)


def chosen(names: str) -> list[Method]:
    """Return the methods of a comma-separated list, or all.

    Raises:
        ValueError: an unknown name.
    """
    known = {method.name: method for method in METHODS}
    if names == "all":
        return list(METHODS)
    for name in names.split(","):
        if name not in known:
            raise invalid("--methods", f"all, or some of {', '.join(known)}", name)
    return [known[name] for name in dict.fromkeys(names.split(","))]
