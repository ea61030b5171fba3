"""The YAML file that the commands share, as dataclasses, and the folders that they write."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megatron_mtraining.errors import invalid

ATTENTIONS = ("mtraining", "dense")
FORMS = ("text", "jsonl", "parquet", "prolong")
SYSTEMS = ("dense", "mtraining", "algorithm_1", "moba", "xattention", "zigzag", "flat")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The model to extend, and the YaRN entry of the extended one."""

    source: str
    """Local Hugging Face folder, ``.gguf`` file that transformers reads, or the name of a model on the hub."""

    length: int
    """Tokens of context that the extended model has."""

    original_length: int | None = None
    """Tokens of context that the model was trained on; default: ``max_position_embeddings`` of its config.json."""

    beta_fast: float = 32.0
    """YaRN: rotations within the original length above which a dimension keeps its frequency."""

    beta_slow: float = 1.0
    """YaRN: rotations within the original length below which a dimension is fully interpolated."""

    truncate: bool = True
    """YaRN: the two bounds between which dimensions are mixed are rounded to integers."""

    verify_text: str = "README.md"
    """Text file on which transformers and Megatron are compared."""

    verify_tokens: int = 512
    """Tokens of that text that are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A source of documents."""

    name: str
    """Name of the data set that is made of the source; letters, digits, dots, dashes and underscores."""

    path: str
    """File, or folder with files of the form; ``python:NAME`` is the folder of an installed package's source code.

    ``python:stdlib`` is Python's own library, and a folder below may follow: ``python:sympy/core``.
    """

    form: str | None = None
    """``text``, ``jsonl``, ``parquet`` or ``prolong``; default: found by the files' endings."""

    pattern: str = "*"
    """Glob pattern of file names in a folder."""

    join: str | None = None
    """Texts that make one document: those of a ``folder``, ``all``, or neighbours with equal ``field:NAME``."""

    text: str = "text"
    """Field or column that holds the text of a record."""

    tokenizer: str | None = None
    """``prolong``: Hugging Face folder of the tokenizer that the shards were made with."""

    weight: float | None = None
    """Share of training samples, relative to the other sources'; all or none have one. Default: by training tokens."""

    max_tokens: int | None = None
    """Training tokens to take at most, the longest documents first; default: all."""

    held_out: bool = False
    """True for a source that is evaluated on and never trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Documents to train on and to hold out."""

    sources: tuple[Source, ...]
    """Sources of documents."""

    held_out_share: float = 0.0
    """Share of the documents of every source, chosen by a hash of their tokens, to hold out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """A training run. Model flags are made from the model's folder; ``flags`` adds to them and wins."""

    megatron_lm: str
    """Folder of a Megatron-LM tree, of which ``pretrain_gpt.py`` runs unchanged."""

    seq_length: int
    """Tokens in a training sequence."""

    steps: int
    """Training steps."""

    attention: str = "mtraining"
    """``mtraining`` for this package's sparse attention, ``dense`` for Megatron's own."""

    run: str | None = None
    """Name of the run's folder; default: the attention."""

    ranks: int = 1
    """Processes of this machine: GPUs, or without one CPU processes. All make one context-parallel group."""

    global_batch_size: int = 1
    """Sequences in a step."""

    learning_rate: float = 2.0e-5
    min_learning_rate: float = 2.0e-6
    warmup_steps: int = 0
    weight_decay: float = 0.1
    seed: int = 1234

    save_every: int = 50
    """Steps between checkpoints; a run that was stopped continues from the last one."""

    held_out_documents: int = 8
    """Number of the longest held-out documents to report the loss on, before and after."""

    flags: dict[str, Any] = field(default_factory=dict)
    """More flags of pretrain_gpt.py and of this package, as in a launch config: ``--bf16: true``."""

    environment: dict[str, Any] = field(default_factory=dict)
    """Environment variables of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareSettings:
    """Runs of the same model and data that ``compare`` trains: each system with each seed."""

    systems: tuple[str, ...] = SYSTEMS[:5]
    """Attentions by name, in the order of the runs; ``zigzag`` and ``flat`` are this package's on several ranks."""

    seeds: tuple[int, ...] = (1, 2)
    """Seeds of the order of the training data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of all commands."""

    output: str
    """Folder that takes everything that the commands write."""

    model: ModelSettings
    data: DataSettings
    train: TrainSettings
    compare: CompareSettings = field(default_factory=CompareSettings)

    @property
    def model_folder(self) -> Path:
        """Hugging Face folder with the YaRN entry."""
        return Path(self.output, "model")

    @property
    def megatron_folder(self) -> Path:
        """Megatron checkpoint of the same weights."""
        return Path(self.output, "model_megatron")

    @property
    def data_folder(self) -> Path:
        """Folder of tokenised data sets and of their report."""
        return Path(self.output, "data")

    @property
    def run_folder(self) -> Path:
        """Folder of the training run."""
        return Path(self.output, "runs", self.train.run or self.train.attention)

    @property
    def export_folder(self) -> Path:
        """Hugging Face folder of the trained weights."""
        return Path(self.output, "export", self.train.run or self.train.attention)


def read_settings(path: str | Path, changes: tuple[str, ...] = ()) -> Settings:
    """Read the YAML file, with ``changes`` such as ``train.steps=20`` applied to it.

    Raises:
        ValueError: a file that is not readable, an unknown or missing key, or a value out of its range.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise invalid("--config", "a readable YAML file", f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise invalid("--config", "a mapping", f"{path} with {type(content).__name__}")
    for change in changes:
        keys, equals, value = change.partition("=")
        *sections, last = keys.split(".")
        if not equals or not last:
            raise invalid("a change", "KEY.KEY=VALUE", change)
        target = content
        for section in sections:
            target = target.setdefault(section, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise invalid("a change", "of a key in a section", change)
        target[last] = yaml.safe_load(value)
    return settings_from(content)


def settings_from(content: dict[str, Any]) -> Settings:
    """Make the settings of a mapping.

    Raises:
        ValueError: an unknown or missing key, or a value out of its range.
    """
    settings = _build(Settings, content, "")
    _check(settings)
    return settings


def _build(kind: type, content: Any, where: str) -> Any:
    """Make the dataclass ``kind`` of a mapping; its sections and lists of sections are made the same."""
    if not isinstance(content, dict):
        raise invalid(where.rstrip(".") or "--config", "a mapping", repr(content))
    hints = get_type_hints(kind)
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    unknown = [str(name) for name in content if name not in known]
    if unknown:
        raise invalid(f"a key of {where.rstrip('.') or 'the file'}", f"one of {', '.join(known)}", ", ".join(unknown))
    values = {}
    for name, entry in known.items():
        is_required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if name in content:
            values[name] = _value(hints[name], content[name], where + name)
        elif is_required:
            raise invalid(where + name, "given", "nothing", "Add it to the file.")
    return kind(**values)


def _value(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{name}.")
    if getattr(hint, "__origin__", None) is tuple:
        if not isinstance(value, list) or not value:
            raise invalid(name, "a list that is not empty", repr(value))
        return tuple(_value(get_args(hint)[0], item, f"{name}[{number}]") for number, item in enumerate(value))
    kinds = tuple(getattr(kind, "__origin__", kind) for kind in get_args(hint) if get_args(hint)) or (hint,)
    if hint == dict[str, Any]:
        kinds = (dict,)
    if float in kinds and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):  # YAML reads 2e-5, without a dot, as text
            value = float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in kinds)
        raise invalid(name, f"of type {expected}", repr(value))
    return value


def _check(settings: Settings) -> None:
    model, data, train = settings.model, settings.data, settings.train
    at_least_one = {
        "model.length": model.length,
        "model.verify_tokens": model.verify_tokens,
        "train.seq_length": train.seq_length,
        "train.steps": train.steps,
        "train.ranks": train.ranks,
        "train.global_batch_size": train.global_batch_size,
        "train.save_every": train.save_every,
    }
    for name, value in at_least_one.items():
        if value < 1:
            raise invalid(name, "at least 1", value)
    if train.attention not in ATTENTIONS:
        raise invalid("train.attention", f"one of {', '.join(ATTENTIONS)}", repr(train.attention))
    unknown = [system for system in settings.compare.systems if system not in SYSTEMS]
    if unknown:
        raise invalid("compare.systems", f"some of {', '.join(SYSTEMS)}", ", ".join(unknown))
    if train.seq_length > model.length:
        raise invalid("train.seq_length", f"at most model.length = {model.length}", train.seq_length)
    if not 0.0 <= data.held_out_share < 1.0:
        raise invalid("data.held_out_share", "in [0, 1)", data.held_out_share)
    names = [source.name for source in data.sources]
    for source in data.sources:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", source.name):
            raise invalid("name of a source", "of letters, digits, dots, dashes and underscores", repr(source.name))
        if names.count(source.name) > 1:
            raise invalid("name of a source", "another for each source", repr(source.name))
        if source.form not in (None, *FORMS):
            raise invalid(f"form of {source.name}", f"one of {', '.join(FORMS)}", repr(source.form))
        if source.weight is not None and source.weight <= 0:
            raise invalid(f"weight of {source.name}", "above 0", source.weight, "Or leave the source out.")
    weighted = [source.weight is not None for source in data.sources if not source.held_out]
    if any(weighted) and not all(weighted):
        raise invalid("weight of a source", "given for all training sources or none", f"for {sum(weighted)} of them")
    if all(source.held_out for source in data.sources):
        raise invalid("data.sources", "of one source at least that is not held out", ", ".join(names))
