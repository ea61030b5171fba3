"""The one dataclass from which every flag, YAML key and checkpoint entry of this package is made.

Estimators and budgets are strategies that it names: one of your own is registered in ESTIMATORS or BUDGETS first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Literal, Protocol, TypeAlias, get_args

from .errors import as_integer, invalid
from .types import ROW_MASK_BITS

Layout: TypeAlias = Literal["auto", "contiguous", "zigzag", "striped", "rotated", "node_striped"]
Schedule: TypeAlias = Literal["auto", "hierarchical", "flat", "gather"]
Backend: TypeAlias = Literal["auto", "reference", "cuda"]
Pattern: TypeAlias = Literal["vertical_slash", "dense", "moba", "xattention"]
IndexSharing: TypeAlias = Literal["head", "kv_group"]

LAYOUTS: tuple[Layout, ...] = get_args(Layout)[1:]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)[1:]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
INDEX_SHARINGS: tuple[IndexSharing, ...] = get_args(IndexSharing)
LOCAL_PATTERNS: tuple[Pattern, ...] = ("moba", "xattention")
"""Patterns whose index each rank holds for its own queries: block lists."""


class Strategy(Protocol):
    """Strategy that a field of the configuration names."""

    reads: tuple[str, ...]
    """Fields of MTrainingConfig that this strategy reads and another of its kind may not."""


class Registry:
    """Strategies of one kind, in the order of registration."""

    def __init__(self, field: str) -> None:
        self.field = field
        self._by_name: dict[str, Strategy] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all registered strategies."""
        return tuple(self._by_name)

    @property
    def fields(self) -> set[str]:
        """Fields of MTrainingConfig that at least one registered strategy reads."""
        return {name for strategy in self._by_name.values() for name in strategy.reads}

    def register(self, name: str, strategy: Strategy) -> None:
        """Make ``strategy`` available as ``name``.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._by_name:
            raise invalid(f"{self.field} name", "new", repr(name), f"Taken are {', '.join(self.names)}.")
        self._by_name[name] = strategy

    def get(self, name: object) -> Any:
        """Return the strategy that was registered as ``name``.

        Raises:
            ValueError: there is none; the sentence lists those that exist.
        """
        if not isinstance(name, str) or name not in self._by_name:
            remedy = f"Register one of your own first, with {self.field.upper()}S.register."
            raise invalid(self.field, f"one of {', '.join(self.names)}", repr(name), remedy)
        return self._by_name[name]


ESTIMATORS = Registry("estimator")
"""Estimators; the shipped ones are registered in selection/estimators.py."""

BUDGETS = Registry("budget")
"""Budgets; the shipped ones are registered in selection/budget.py."""


def _choice(default: str, allowed: tuple[str, ...]) -> Any:
    """Declare a field that is one of ``allowed``."""
    return field(default=default, metadata={"allowed": allowed})


def _integer(default: int, *, least: int, pattern: Pattern | None = None) -> Any:
    """Declare an integer of at least ``least``; ``pattern`` alone reads it."""
    return field(default=default, metadata={"least": least, "pattern": pattern})


def _share(default: float | None, *, pattern: Pattern) -> Any:
    """Declare a share in (0, 1] that ``pattern`` alone reads; None is allowed where it is the default."""
    return field(default=default, metadata={"share": True, "pattern": pattern})


def _strategy(default: str) -> Any:
    """Declare the name of a registered strategy, which ``vertical_slash`` alone reads."""
    return field(default=default, metadata={"pattern": "vertical_slash"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MTrainingConfig:
    """Configuration of sparse attention: selection of keys, layout of tokens and schedule of the ring.

    A field whose sentence begins with the name of a pattern is for the selection of that pattern alone, and a name in
    brackets behind it is that of the budget or estimator that reads the field. Others ignore it, so that runs which
    compare patterns may share their flags; :attr:`unused` names what is set and not read, and training logs that at its
    start. What a pattern reads and does not support raises.

    Raises:
        ValueError: a field is out of its range; the sentence names the field and the rule.
    """

    layout: Layout = _choice("auto", get_args(Layout))
    """Layout of blocks over ranks: ``contiguous``, ``zigzag``, ``striped``, ``rotated`` or ``node_striped``.

    ``auto`` takes ``striped`` or ``node_striped`` by predicted time, once at the start, and logs why.
    """

    schedule: Schedule = _choice("auto", get_args(Schedule))
    """Schedule of keys between ranks: ``hierarchical`` (inner and outer ring), ``flat`` or ``gather``.

    ``auto`` takes the one of the least predicted time, once, and logs why.
    """

    profile: str = field(default="auto", metadata={"named": True})
    """Profile of the machine by which ``auto`` decides: a file of ``mtraining profile``, or a name such as ``h200``.

    ``auto`` takes the one of the GPU's name.
    """

    backend: Backend = _choice("auto", BACKENDS)
    """Kernels that compute attention: ``auto`` chooses once and logs it; a named one never falls back."""

    pattern: Pattern = _choice("vertical_slash", PATTERNS)
    """Keys that a query may select: ``vertical_slash``, or for comparison ``dense``, ``moba`` or ``xattention``."""

    budget: str = _strategy("cost")
    """``vertical_slash``: name of the registered budget: ``cost``, ``top_p``, ``fixed`` or ``top_p_literal``."""

    estimator: str = _strategy("probe_windows")
    """``vertical_slash``: name of the registered estimator of attention: ``probe_windows`` or ``last_window``."""

    index_sharing: IndexSharing = _choice("head", INDEX_SHARINGS)
    """Owner of a list of selected keys: each query ``head``, or each ``kv_group`` of heads that use one key/value head.

    ``moba`` and ``xattention`` support ``head`` only.
    """

    num_probe_rows: int = _integer(512, least=1, pattern="vertical_slash")
    """``vertical_slash``: query rows of a document that are scored; all of them in a shorter document."""

    num_probe_windows: int = _integer(64, least=1, pattern="vertical_slash")
    """``vertical_slash`` (``probe_windows``): windows into which the probe rows are divided, spread evenly."""

    target_recall: float = _share(0.95, pattern="vertical_slash")
    """``vertical_slash`` (``cost``): share of the attention mass that a head must reach, in (0, 1]."""

    max_density: float | None = _share(None, pattern="vertical_slash")
    """``vertical_slash`` (``cost``): most of a layer's causal pairs that are computed, in (0, 1]; none by default.

    It takes precedence over ``target_recall``, and no head becomes dense by ``dense_above``. Documents of up to
    ``dense_below`` tokens are not counted; batch rows of different padding are bounded each by itself.
    """

    dense_above: float = _share(0.4, pattern="vertical_slash")
    """``vertical_slash`` (``cost``): density above which a list becomes dense, in (0, 1]."""

    sink_tokens: int = _integer(16, least=0, pattern="vertical_slash")
    """``vertical_slash``: leading tokens of each document that every head selects as verticals."""

    local_blocks: int = _integer(2, least=1, pattern="vertical_slash")
    """``vertical_slash``: distances 0 to ``local_blocks - 1``, which every head selects; at least 1."""

    vertical_top_p: float = _share(0.5, pattern="vertical_slash")
    """``vertical_slash`` (``top_p``): share of the mass beside sinks and local blocks that verticals must reach."""

    slash_top_p: float = _share(0.8, pattern="vertical_slash")
    """``vertical_slash`` (``top_p``): share of the mass left after the verticals that slashes must reach, in (0, 1]."""

    max_vertical: int = _integer(1024, least=0, pattern="vertical_slash")
    """``vertical_slash`` (``top_p``, ``fixed``): most verticals beside the sinks; their number in ``fixed``."""

    max_slash: int = _integer(120, least=0, pattern="vertical_slash")
    """``vertical_slash`` (``top_p``, ``fixed``): most distances beside the local blocks; their number in ``fixed``."""

    slash_run_length: int = _integer(1, least=1, pattern="vertical_slash")
    """``vertical_slash`` (``top_p``, ``fixed``): neighbouring distances selected together, from ``local_blocks`` on.

    Those of a run share key tiles in the Hopper kernels; 1 evaluates each distance by itself.
    """

    moba_chunk: int = _integer(4096, least=1, pattern="moba")
    """``moba``: tokens in a chunk of keys, a multiple of ``block_size``."""

    moba_top_k: int = _integer(12, least=1, pattern="moba")
    """``moba``: chunks that a query selects, its own included."""

    xattention_block: int = _integer(128, least=1, pattern="xattention")
    """``xattention``: tokens in a block of keys, a multiple of ``block_size``."""

    xattention_stride: int = _integer(16, least=1, pattern="xattention")
    """``xattention``: neighbouring tokens whose antidiagonal makes one score; divides ``block_size``."""

    xattention_threshold: float = _share(0.9, pattern="xattention")
    """``xattention``: share of the estimated attention that a query block's selected blocks must reach, in (0, 1]."""

    dense_below: int = _integer(4096, least=0)
    """Documents of up to this many tokens attend densely; 0 makes every document sparse."""

    dense_layers: tuple[int, ...] = ()
    """Layer numbers, counted from 1 as Megatron does, that attend densely at every length."""

    dense_warmup_steps: int = _integer(0, least=0)
    """Number of training steps at the start in which every layer attends densely."""

    block_size: int = _integer(64, least=1)
    """Tokens in a block of the layout and of the slash grid; the CUDA kernels support 64 only."""

    @classmethod
    def algorithm_1(cls, **changes: Any) -> MTrainingConfig:
        """Return the configuration of the MTraining paper's Algorithm 1, with ``changes``.

        Sinks and local blocks, and the order in which their mass and that of the verticals is taken out, are ours:
        ``budget="top_p_literal"`` is the listing.
        """
        paper = {
            "budget": "top_p",
            "estimator": "last_window",
            "num_probe_rows": 64,
            "sink_tokens": 128,
            "local_blocks": 8,
            "vertical_top_p": 0.5,
            "slash_top_p": 0.8,
            "max_vertical": 1024,
            "max_slash": 120,
        }
        return cls(**(paper | changes))

    @property
    def unused(self) -> tuple[str, ...]:
        """Fields that are not at their defaults and that neither the pattern nor its strategies read."""
        ignored = {each.name for each in fields(self) if each.metadata.get("pattern") not in (None, self.pattern)}
        for registry, name in ((BUDGETS, self.budget), (ESTIMATORS, self.estimator)):
            ignored |= registry.fields - set(registry.get(name).reads)
        return tuple(
            each.name
            for each in fields(self)
            if each.name in ignored and each.metadata.get("pattern") and getattr(self, each.name) != each.default
        )

    def num_lists(self, *, num_heads: int, num_kv_heads: int) -> int:
        """Return the number of lists of an index that is selected for so many query and key/value heads."""
        return num_kv_heads if self.index_sharing == "kv_group" else num_heads

    def __post_init__(self) -> None:
        if not isinstance(self.dense_layers, (tuple, list)):
            raise invalid("dense_layers", "a tuple of layer numbers", repr(self.dense_layers))
        for each in fields(self):
            object.__setattr__(self, each.name, _checked(each.name, getattr(self, each.name), each.metadata))
        layers = tuple(as_integer("a layer of dense_layers", layer, least=1) for layer in self.dense_layers)
        if len(set(layers)) < len(layers):
            raise invalid("dense_layers", "layer numbers that differ", layers, "Give each layer once.")
        object.__setattr__(self, "dense_layers", layers)
        BUDGETS.get(self.budget)
        ESTIMATORS.get(self.estimator)
        if self.pattern == "vertical_slash":
            self._check_vertical_slash()
        self._check_pattern()

    def _check_vertical_slash(self) -> None:
        if self.num_probe_rows % self.num_probe_windows and self.estimator == "probe_windows":
            got = f"{self.num_probe_rows} and {self.num_probe_windows}"
            raise invalid("num_probe_rows", "a multiple of num_probe_windows", got, "Change one of them.")
        if self.slash_run_length > 1 and self.budget == "cost":
            raise ValueError(
                "unsupported: slash_run_length above 1 with budget cost. "
                "Set slash_run_length to 1, or budget to top_p or fixed."
            )
        reads_runs = "slash_run_length" in BUDGETS.get(self.budget).reads
        if 0 < self.max_slash < self.slash_run_length and reads_runs:
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


def _checked(name: str, value: Any, rules: Any) -> Any:
    """Return the value of a field as the type that its metadata asks for.

    Raises:
        ValueError: the value breaks one of the rules.
    """
    if "allowed" in rules and value not in rules["allowed"]:
        raise invalid(name, f"one of {', '.join(rules['allowed'])}", repr(value))
    if "named" in rules and not (isinstance(value, str) and value):
        raise invalid(name, "auto, a name or a file", repr(value))
    if "least" in rules:
        return as_integer(name, value, least=rules["least"])
    if "share" in rules and not (value is None and name == "max_density"):
        if not isinstance(value, Real) or isinstance(value, bool) or not 0.0 < value <= 1.0:
            raise invalid(name, "in (0, 1]", repr(value))
        return value if isinstance(value, int) else float(value)
    return value
