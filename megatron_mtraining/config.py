"""The one dataclass from which every flag, YAML key and checkpoint entry of this package is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real

from .errors import as_integer, invalid
from .types import ROW_MASK_BITS

LAYOUTS = ("contiguous", "zigzag", "striped", "rotated", "node_striped")
SCHEDULES = ("hierarchical", "flat", "gather")
BACKENDS = ("auto", "reference", "cuda")
INDEX_SHARINGS = ("head", "kv_group")
LOCAL_PATTERNS = ("moba", "xattention")
"""Patterns whose index each rank holds for its own queries: block lists."""

PATTERNS = ("vertical_slash", "dense", *LOCAL_PATTERNS)
CHOICES = {
    "layout": LAYOUTS,
    "schedule": SCHEDULES,
    "backend": BACKENDS,
    "index_sharing": INDEX_SHARINGS,
    "pattern": PATTERNS,
}
"""Allowed values of the fields that are names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MTrainingConfig:
    """Configuration of sparse attention: selection of keys, layout of tokens and schedule of the ring.

    A field whose sentence begins with the name of a pattern is for the selection of that pattern alone. Others leave it
    aside, so that runs which compare patterns may share their flags; :attr:`unused` names what is set and not read, and
    training says so at its start. What a pattern reads and cannot do it refuses.

    Raises:
        ValueError: a field is out of its range; the sentence names the field and the rule.
    """

    layout: str = "striped"
    """Layout of blocks over ranks: ``contiguous``, ``zigzag``, ``striped``, ``rotated`` or ``node_striped``."""

    schedule: str = "hierarchical"
    """Schedule of keys between ranks: ``hierarchical`` (inner and outer ring), ``flat`` or ``gather``."""

    backend: str = "auto"
    """Kernels that compute attention: ``auto`` chooses once and logs it; a named one never falls back."""

    pattern: str = "vertical_slash"
    """Keys that a query may keep: ``vertical_slash``, or for comparison ``dense``, ``moba`` or ``xattention``."""

    estimator: str = "last_window"
    """``vertical_slash``: name of the registered estimator that scores keys: ``last_window`` or ``probe_windows``."""

    index_sharing: str = "head"
    """Owner of a list of kept keys: each query ``head``, or each ``kv_group`` of heads that use one key/value head.

    ``moba`` and ``xattention`` know ``head`` only.
    """

    window: int = 64
    """``vertical_slash``: query rows that are looked at, the last ones of a document or spread over it."""

    num_probe_windows: int = 8
    """``vertical_slash``: pieces that ``probe_windows`` splits its ``window`` rows into; ``last_window`` has one."""

    sink_tokens: int = 128
    """``vertical_slash``: leading tokens of each document that every head keeps as verticals."""

    local_blocks: int = 8
    """``vertical_slash``: distances 0 to ``local_blocks - 1``, which every head keeps; at least 1."""

    vertical_top_p: float = 0.5
    """``vertical_slash``: share of the mass left after sinks and local blocks that verticals must reach, in (0, 1]."""

    slash_top_p: float = 0.8
    """``vertical_slash``: share of the mass left after the verticals that slashes must reach, in (0, 1]."""

    max_vertical: int = 1024
    """``vertical_slash``: most verticals a head keeps beside its sinks; 0 keeps none."""

    max_slash: int = 120
    """``vertical_slash``: most slash distances a head keeps beside its local blocks; 0 keeps none."""

    slash_run_length: int = 1
    """``vertical_slash``: number of neighbouring distances kept or left together, counted from ``local_blocks`` on.

    Those of a run share key tiles in the Hopper kernels; 1 judges each distance by itself.
    """

    moba_chunk: int = 4096
    """``moba``: tokens in a chunk of keys, a multiple of ``block_size``."""

    moba_top_k: int = 12
    """``moba``: chunks that a query keeps, its own included."""

    xattention_block: int = 128
    """``xattention``: tokens in a block of keys, a multiple of ``block_size``."""

    xattention_stride: int = 16
    """``xattention``: neighbouring tokens whose antidiagonal makes one score; divides ``block_size``."""

    xattention_threshold: float = 0.9
    """``xattention``: share of the estimated attention that the kept blocks of a query block must reach, in (0, 1]."""

    dense_below: int = 4096
    """Documents of up to this many tokens attend densely; 0 makes every document sparse."""

    dense_layers: tuple[int, ...] = ()
    """Layer numbers, counted from 1 as Megatron does, that attend densely at every length."""

    dense_warmup_steps: int = 0
    """Number of training steps at the start in which every layer attends densely."""

    block_size: int = 64
    """Tokens in a block of the layout and of the slash grid; the CUDA kernels know 64 only."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Fields that are not at their defaults and that neither the pattern nor its estimator reads."""
        unread = {name for pattern, names in _READ_BY.items() if pattern != self.pattern for name in names}
        if self.estimator == "last_window":
            unread.add("num_probe_windows")
        return tuple(
            field.name for field in fields(self) if field.name in unread and getattr(self, field.name) != field.default
        )

    def num_lists(self, *, num_heads: int, num_kv_heads: int) -> int:
        """Return the number of lists of an index that is selected for so many query and key/value heads."""
        return num_kv_heads if self.index_sharing == "kv_group" else num_heads

    def __post_init__(self) -> None:
        if not isinstance(self.dense_layers, (tuple, list)):
            raise invalid("dense_layers", "a tuple of layer numbers", repr(self.dense_layers))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise invalid(name, f"one of {', '.join(allowed)}", repr(getattr(self, name)))
        if not isinstance(self.estimator, str):
            raise invalid("estimator", "the name of an estimator", repr(self.estimator))
        for name in ("vertical_top_p", "slash_top_p", "xattention_threshold"):
            share = getattr(self, name)
            if not isinstance(share, Real) or isinstance(share, bool) or not 0.0 < share <= 1.0:
                raise invalid(name, "in (0, 1]", repr(share))
            object.__setattr__(self, name, share if isinstance(share, int) else float(share))
        for name, least in _LEAST.items():
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least=least))
        layers = tuple(as_integer("a layer of dense_layers", layer, least=1) for layer in self.dense_layers)
        if len(set(layers)) < len(layers):
            raise invalid("dense_layers", "layer numbers that differ", layers, "Give each layer once.")
        object.__setattr__(self, "dense_layers", layers)
        if self.pattern == "vertical_slash":
            self._check_vertical_slash()
        self._check_pattern()

    def _check_vertical_slash(self) -> None:
        if self.window % self.num_probe_windows and self.estimator == "probe_windows":
            raise invalid("window", "a multiple of num_probe_windows", f"{self.window} and {self.num_probe_windows}")
        if 0 < self.max_slash < self.slash_run_length:
            rule = f"0 or at least slash_run_length = {self.slash_run_length}"
            raise invalid("max_slash", rule, self.max_slash, "Raise it, or lower slash_run_length.")

    def _check_pattern(self) -> None:
        chunk = {"moba": "moba_chunk", "xattention": "xattention_block"}.get(self.pattern)
        if chunk is not None and getattr(self, chunk) % self.block_size:
            raise invalid(chunk, f"a multiple of block_size = {self.block_size}", getattr(self, chunk))
        if self.pattern in LOCAL_PATTERNS and self.index_sharing != "head":
            rule = f"head for the pattern {self.pattern}, which selects for each query head"
            raise invalid("index_sharing", rule, repr(self.index_sharing))
        if self.pattern == "moba" and self.block_size > ROW_MASK_BITS:
            raise invalid("block_size", f"at most {ROW_MASK_BITS} for the pattern moba", self.block_size)
        if self.pattern == "xattention" and self.block_size % self.xattention_stride:
            raise invalid("xattention_stride", f"a divisor of block_size = {self.block_size}", self.xattention_stride)


def check_config(given: object) -> None:
    """Refuse what is no configuration, before anything is asked of it.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(given, MTrainingConfig):
        raise invalid("config", "an MTrainingConfig", None if given is None else type(given).__name__)


_READ_BY = {
    "vertical_slash": (
        *("estimator", "window", "num_probe_windows", "sink_tokens", "local_blocks"),
        *("vertical_top_p", "slash_top_p", "max_vertical", "max_slash", "slash_run_length"),
    ),
    "moba": ("moba_chunk", "moba_top_k"),
    "xattention": ("xattention_block", "xattention_stride", "xattention_threshold"),
}
"""Fields that the selection of one pattern alone reads."""

_LEAST = {
    "window": 1,
    "num_probe_windows": 1,
    "sink_tokens": 0,
    "local_blocks": 1,
    "max_vertical": 0,
    "max_slash": 0,
    "slash_run_length": 1,
    "moba_chunk": 1,
    "moba_top_k": 1,
    "xattention_block": 1,
    "xattention_stride": 1,
    "dense_below": 0,
    "dense_warmup_steps": 0,
    "block_size": 1,
}
