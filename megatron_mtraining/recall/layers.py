"""Sources of layers: a Hugging Face model that reads a text, and files that hold query and key of one layer each."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..config import MTrainingConfig
from ..errors import InvalidError, invalid
from ..metrics import AttentionCall
from ..validate import check_query_and_key

Take = Callable[[AttentionCall], None]
"""Receiver of the attention calls of a text, one layer after the other."""


def load_layer(path: Path, number: int) -> AttentionCall:
    """Load a file of ``query`` and ``key``, and where they are known ``softmax_scale`` and ``cu_seqlens``.

    Args:
        path: written by ``torch.save``: a dict of tensors ``[batch, seq, heads, head_dim]``.
        number: of the layer.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise invalid("--load", "a file that can be read", f"{path}: {error.strerror}") from None
    except (RuntimeError, EOFError, LookupError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]  # the error of an empty file has no text
        raise invalid("--load", "a file that torch.save wrote", f"{path}: {reason}") from None
    saved = saved if isinstance(saved, dict) else {}
    missing = [name for name in ("key", "query") if not isinstance(saved.get(name), Tensor)]
    if missing:
        got = f"{path} without {' and '.join(missing)}"
        raise invalid("--load", "a file with a dict of the tensors query and key", got)
    query, key, cu_seqlens = saved["query"], saved["key"], saved.get("cu_seqlens")
    check_query_and_key(query, key, packed=cu_seqlens is not None)
    return AttentionCall(number, query, key, None, saved.get("softmax_scale"), cu_seqlens)


def read_tokens(paths: Sequence[Path], folder: Path, *, length: int) -> Iterator[tuple[str, Tensor]]:
    """Yield name and int64 ``[length]`` tokens of each text.

    Args:
        paths: files of text, or ``.npy`` files of tokens: every row of one with two dimensions is a text.
        folder: of the model, whose tokenizer reads text.
        length: tokens of each text; the first ones count.

    Raises:
        ValueError: a text is shorter, or cannot be read.
    """
    for path in paths:
        try:
            texts = _saved_tokens(path) if path.suffix == ".npy" else [_tokenized(path, folder)]
        except OSError as error:
            raise invalid("--text", "a file that can be read", f"{path}: {error.strerror or error}") from None
        for i, tokens in enumerate(texts):
            name = f"{path.name}[{i}]" if len(texts) > 1 else path.name
            if len(tokens) < length:
                remedy = "Give a longer text, or a lower --length."
                raise invalid("--text", f"of at least {length} tokens", f"{len(tokens)} in {name}", remedy)
            yield name, tokens[:length]


def _saved_tokens(path: Path) -> list[Tensor]:
    import numpy as np

    tokens = np.load(path, mmap_mode="r")
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
        raise invalid("--text", "tokens with one or two dimensions", f"{path}: {tokens.dtype} {tokens.shape}")
    return [torch.from_numpy(row.astype(np.int64)) for row in tokens.reshape(-1, tokens.shape[-1])]


def _tokenized(path: Path, folder: Path) -> Tensor:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        remedy = "Give --text a .npy file of tokens."
        raise invalid("--model", "a folder with a tokenizer", f"{folder}: {error}", remedy) from None
    return torch.tensor(tokenizer(path.read_text(errors="replace"))["input_ids"], device="cpu")


def run_model(folder: Path, texts: Iterator[tuple[str, Tensor]], *, length: int, device: str, take: Take) -> None:
    """Read texts with a model whose attention is dense, and hand each layer's calls to ``take``.

    Args:
        folder: a Hugging Face folder; weights are bfloat16 on a GPU, float32 on a CPU.
        texts: name and tokens of each.
        length: tokens of the texts; positions beyond the model's are stretched by YaRN.
        device: where it runs.
        take: receiver of the calls.

    Raises:
        ValueError: the folder holds no model that this attention supports.
    """
    from transformers import AutoConfig, AutoModel

    from .. import hf

    if not (folder / "config.json").is_file():
        raise invalid("--model", "a Hugging Face folder, with config.json", folder)
    config = AutoConfig.from_pretrained(folder)
    factor = hf.stretch_positions(config, length)
    if factor > 1:
        print(f"positions of {folder.name} stretched by YaRN, factor {factor}, to {length} tokens", file=sys.stderr)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = AutoModel.from_pretrained(folder, config=config, dtype=dtype, attn_implementation=hf.NAME)
    model = model.to(device).eval()
    hf.configure(model, MTrainingConfig(pattern="dense"))
    calls = 0

    def count(call: AttentionCall) -> None:
        nonlocal calls
        calls += 1
        print(f"layer {call.layer}", end="\r", file=sys.stderr)
        take(call)

    with torch.no_grad(), hf.observe(count):
        for name, tokens in texts:
            print(f"reads {name}", file=sys.stderr)
            model(input_ids=tokens[None].to(device), use_cache=False)
            print(file=sys.stderr)
    if not calls:
        raise InvalidError(f"unsupported: mtraining recall with {folder}, whose layers call no attention by name.")
