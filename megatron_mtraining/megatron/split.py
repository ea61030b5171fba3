"""Split of a sequence over the context-parallel ranks, and Megatron's functions that follow it.

Megatron assumes its own zigzag split wherever it cuts a batch or a rotary table, shifts tokens across ranks or orders
them for a scan. Each such function is replaced by one that takes the ranks' tokens from a :class:`TokenSplit`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import invalid
from ..layout import SequenceLayout, shard_sequence, token_positions
from ..tensors import cached_tensors, to_device
from ..transport import as_transport
from .compat import MissingSymbolError, Patches, has_module, require_symbol
from .documents import documents_of, packed_seq_params, positions_in_documents

Pair = tuple[Callable[..., Any], Callable[..., Any]]
"""A function of Megatron, and the one that replaces it."""

_UTILS = "megatron.core.utils"
_EMBEDDINGS = "megatron.core.models.common.embeddings"
_CUTTERS = (
    ("_get_batch_on_this_cp_rank_per_sequence_balancing", "_get_batch_on_this_cp_rank_per_document_balancing"),
    ("get_pretrain_batch_on_this_cp_rank", "get_sft_batch_on_this_cp_rank"),
)
"""Functions that cut a sequence and a pack, both ``(batch, cp_group)``, newest release first."""

_PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")
_WHOLE = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "packed_seq_params")
_OTHERS = "Split it with shard_sequence, or pass --mtraining-layout zigzag, which is Megatron's own split."


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Layout of every sequence of this process, whatever its length and whichever group holds it."""

    layout: str
    """Kind of :class:`megatron_mtraining.SequenceLayout`."""

    block_size: int
    """Tokens in a block."""

    node_size: int | None
    """Ranks in a node, for a layout that asks."""

    def sequence(self, seq_len: int, cp_size: int) -> SequenceLayout:
        """Return the layout of a sequence: the rank of each block.

        Raises:
            ValueError: a length that the layout does not divide.
        """
        return _sequence(self, seq_len, cp_size)

    @cached_tensors(maxsize=16)  # every layer of a packed batch asks twice, for queries and for keys
    def positions(self, table_len: int, cp_size: int, cp_rank: int, device: torch.device) -> Tensor:
        """Return the rows, int64 on ``device``, of a table of ``table_len`` positions that are a rank's tokens.

        YaRN also cuts a table of its original context length when it is built, which the layout need not divide; that
        table is cut as if it were longer. The attention raises an error for sequences of such a length.
        """
        multiple = SequenceLayout.required_multiple(self.layout, cp_size=cp_size, block_size=self.block_size)
        positions = token_positions(self.sequence(-(-table_len // multiple) * multiple, cp_size), cp_rank=cp_rank)
        return to_device(positions[positions < table_len], device)

    @cached_tensors(maxsize=4)
    def rank_order(self, seq_len: int, cp_size: int, device: torch.device) -> Tensor:
        """Return int64 ``[seq_len]`` on ``device``: positions of all tokens, first rank first, each in its order."""
        sequence = self.sequence(seq_len, cp_size)
        return to_device(torch.cat([token_positions(sequence, cp_rank=rank) for rank in range(cp_size)]), device)

    @cached_tensors(maxsize=4)
    def sequence_order(self, seq_len: int, cp_size: int, device: torch.device) -> Tensor:
        """Return int64 ``[seq_len]``, on ``device``: where each position is in :meth:`rank_order`, its inverse."""
        return to_device(torch.argsort(self.rank_order(seq_len, cp_size, torch.device("cpu"))), device)

    @cached_tensors(maxsize=4)
    def blocks_by_rank(self, seq_len: int, cp_size: int, device: torch.device) -> Tensor:
        """Return int64 ``[cp_size, num_local_blocks]``, on ``device``: each rank's blocks, ascending."""
        return to_device(self.sequence(seq_len, cp_size).blocks_by_rank(), device)


@lru_cache(maxsize=64)
def _sequence(split: TokenSplit, seq_len: int, cp_size: int) -> SequenceLayout:
    sizes = {"seq_len": seq_len, "cp_size": cp_size, "block_size": split.block_size, "node_size": split.node_size}
    return SequenceLayout(split.layout, **sizes)


def split_batch(batch: Mapping[str, Any], layout: SequenceLayout, cp_rank: int) -> dict[str, Any]:
    """Return this rank's part of a batch; see :func:`megatron_mtraining.megatron.shard_batch`."""
    if batch.get("attention_mask") is not None:
        raise invalid(
            "attention_mask",
            "None",
            f"a tensor of shape {tuple(batch['attention_mask'].shape)}",
            "Attention is causal and separates documents by cu_seqlens; pass --no-create-attention-mask-in-dataloader.",
        )
    part = {}
    for name, value in batch.items():
        if name in _PER_TOKEN and value is not None:
            part[name] = shard_sequence(value, layout, cp_rank=cp_rank, dim=1)
        elif name in _WHOLE or not isinstance(value, Tensor) or value.dim() < 2:
            part[name] = value
        else:
            raise invalid("batch", f"of {', '.join(_PER_TOKEN + _WHOLE)}", repr(name), _OTHERS)
    return part


def batch_replacements(split: TokenSplit) -> list[Pair]:
    """Return the functions of Megatron that cut a batch, each with its replacement.

    Their names depend on the release. The public function that training scripts call remains Megatron's where it only
    passes the batch on to private ones.

    Raises:
        MissingSymbolError: this Megatron-Core has none of the known families.
    """

    def get_batch_on_this_cp_rank(batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
        """Leave this rank's tokens in ``batch``, of a sequence or of a whole pack of documents, and return it."""
        if batch.get("local_cp_size") is not None:
            raise _hybrid()
        cp_group = _context_parallel_group() if cp_group is None else cp_group
        tokens = next((batch[name] for name in ("tokens", "labels") if batch.get(name) is not None), None)
        if cp_group.size() > 1 and tokens is not None:
            sequence = split.sequence(tokens.shape[1], cp_group.size())
            batch.update(split_batch(batch, sequence, cp_group.rank()))
        return batch

    def get_thd_batch_on_this_cp_rank(
        batch: dict[str, Any],
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
        max_seqlen: Tensor,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> tuple[dict[str, Any], Any]:
        """Leave this rank's tokens of the whole pack in ``batch``; return it with the documents' PackedSeqParams."""
        group = _context_parallel_group()
        if (cp_size, cp_rank) not in ((None, None), (group.size(), group.rank())):
            raise invalid("cp_size and cp_rank", "those of the context-parallel group", (cp_size, cp_rank))
        # Loaders put a dimension of one row before the bounds.
        bounds, padded = (each if each is None else each.squeeze(0) for each in (cu_seqlens, cu_seqlens_padded))
        longest = int(torch.as_tensor(max_seqlen, device="cpu").max())
        params = packed_seq_params(bounds, cu_seqlens_padded=padded, max_seqlen=longest)
        return get_batch_on_this_cp_rank(batch, group), params

    def get_batch_on_this_hybrid_cp_rank(*_: Any, **__: Any) -> None:
        """Raise ValueError: sequences over groups of different sizes are unsupported."""
        raise _hybrid()

    def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, cp_size: int, rank: int) -> Tensor:
        """Return the positions of a rank's tokens in the whole pack, int32, on the device of ``cu_seqlens``."""
        order = split.rank_order(total_tokens, cp_size, cu_seqlens.device)
        return order.view(cp_size, -1)[rank].to(torch.int32)

    utils = importlib.import_module(_UTILS)
    indices = getattr(getattr(utils, "tex", None), "thd_get_partitioned_indices", None)
    # TransformerEngine's, by which models and scripts of Megatron's cut packs themselves
    pairs = [] if indices is None else [(indices, thd_get_partitioned_indices)]
    for family in _CUTTERS:
        if hasattr(utils, family[0]):
            # Each replacement is an object of its own: restoring one must not restore the other.
            return pairs + [
                (require_symbol(_UTILS, name, parameters=("batch", "cp_group")), _copy_of(get_batch_on_this_cp_rank))
                for name in family
            ]
    public = require_symbol(_UTILS, "get_batch_on_this_cp_rank", parameters=("batch", "cp_group"))
    if "is_hybrid_cp" in inspect.signature(public).parameters:
        names = " or ".join(name for name, _ in _CUTTERS)
        raise MissingSymbolError(f"{_UTILS} must have {names}, got neither. This release cuts batches in another way.")
    packed = require_symbol(
        _UTILS, "get_thd_batch_on_this_cp_rank", parameters=("batch", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")
    )
    hybrid = require_symbol(_UTILS, "get_batch_on_this_hybrid_cp_rank", parameters=("batch", "local_cp_size"))
    return [
        *pairs,
        (public, get_batch_on_this_cp_rank),
        (packed, get_thd_batch_on_this_cp_rank),
        (hybrid, get_batch_on_this_hybrid_cp_rank),
    ]


def _copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _hybrid() -> ValueError:
    return invalid(
        "hybrid_context_parallel",
        "False",
        True,
        "Every sequence uses the same context-parallel group; leave --hybrid-context-parallel out.",
    )


def _context_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def rope_replacements(split: TokenSplit) -> list[Pair]:
    """Return Megatron's functions that cut rotary tables, each with its replacement.

    Raises:
        MissingSymbolError: this Megatron-Core has no such function.
    """
    utils = f"{_EMBEDDINGS}.rope_utils"
    cut = require_symbol(utils, "get_pos_emb_on_this_cp_rank", parameters=("pos_emb", "seq_dim", "cp_group"))
    rotate_packed = require_symbol(
        utils, "_apply_rotary_pos_emb_thd", parameters=("t", "cu_seqlens", "freqs", "cp_group")
    )
    rotate = require_symbol(utils, "_apply_rotary_pos_emb_bshd", parameters=("t", "freqs"))
    accepted = inspect.signature(rotate).parameters

    def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
        """Return the rows of ``pos_emb`` (``seq_len`` along ``seq_dim``) that belong to this rank's tokens."""
        where = (cp_group.size(), cp_group.rank(), pos_emb.device)
        return pos_emb.index_select(seq_dim, split.positions(pos_emb.shape[seq_dim], *where))

    def _apply_rotary_pos_emb_thd(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, cp_group: Any, **options: Any
    ) -> Tensor:
        """Rotate packed tokens ``[local_tokens, heads, head_dim]`` by their positions within their documents."""
        if cp_group.size() == 1:
            return rotate_packed(t, cu_seqlens, freqs, cp_group=cp_group, **options)
        seq_len, max_seqlen = t.shape[0] * cp_group.size(), options.get("max_seqlen")
        rows = split.positions(seq_len, cp_group.size(), cp_group.rank(), freqs.device)
        # Megatron's rules for a table that covers the whole pack, where positions continue across documents: later
        # releases compare it with the longest document, earlier ones with the length of the pack.
        covers_pack = freqs.shape[0] == seq_len if max_seqlen is None else freqs.shape[0] > max_seqlen
        if not covers_pack:
            # The padding after a document may lie beyond the table; its rotation is never used.
            rows = positions_in_documents(rows, cu_seqlens).clamp(max=freqs.shape[0] - 1)
        options = {name: value for name, value in options.items() if name in accepted}
        return rotate(t.unsqueeze(1), freqs.index_select(0, rows), **options).squeeze(1)

    return [(cut, get_pos_emb_on_this_cp_rank), (rotate_packed, _apply_rotary_pos_emb_thd)]


def clear_rotary_tables() -> None:
    """Empty the caches of rotary tables, which functions replaced since have cut."""
    for module, name in (
        ("rotary_pos_embedding", "RotaryEmbedding"),
        ("yarn_rotary_pos_embedding", "YarnRotaryEmbedding"),
    ):
        cache_clear = getattr(require_symbol(f"{_EMBEDDINGS}.{module}", name).forward, "cache_clear", None)
        if cache_clear is not None:
            cache_clear()


def roll_replacements(split: TokenSplit) -> list[Pair]:
    """Return Megatron's ``roll_tensor``, by which multi-token prediction shifts its inputs and labels.

    Megatron takes a rank's tokens for two pieces of the sequence. Under another layout a rank has many blocks, and the
    last token of each needs the first of the block that follows, from another rank. Nothing would fail without the
    replacement: the model would train on the wrong tokens.

    Raises:
        MissingSymbolError: this Megatron-Core has no such function.
    """
    original = require_symbol(
        "megatron.core.transformer.multi_token_prediction",
        "roll_tensor",
        parameters=("tensor", "shifts", "dims", "cp_group", "packed_seq_params"),
    )

    def roll_tensor(
        tensor: Tensor | None,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        return_sum: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return each token's successor in the sequence or document, zero for the last, and the sum of them here."""
        if tensor is None:
            return None, None
        if cp_group is None or cp_group.size() == 1:
            options = {} if return_sum else {"return_sum": False}  # earlier releases have no such parameter
            return original(tensor, shifts, dims, cp_group, packed_seq_params, **options)
        if shifts != -1:
            raise invalid("shifts", "-1, one token to the left", shifts, "Use --mtraining-layout zigzag.")
        rolled = _Successor.apply(tensor.movedim(dims, 0), split, cp_group).movedim(0, dims)
        if packed_seq_params is not None:
            rolled = _ended_at_documents(rolled, dims, split, cp_group, packed_seq_params)
        return rolled, rolled.sum() if return_sum else None

    return [(original, roll_tensor)]


class _Successor(torch.autograd.Function):
    """Successor of each token in the sequence; the gradient of a token is that of its predecessor's successor."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, split: TokenSplit, cp_group: Any) -> Tensor:
        """Return the successors of ``tokens``, ``[local_len, ...]``, in the rank's order."""
        ctx.split, ctx.cp_group = split, cp_group
        return _neighbours(tokens, split, cp_group, step=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _neighbours(gradient, ctx.split, ctx.cp_group, step=-1), None, None


def _neighbours(tokens: Tensor, split: TokenSplit, cp_group: Any, *, step: int) -> Tensor:
    """Return the token ``step`` (1 or -1) further in the sequence for each of ``[local_len, ...]``; zero at its end."""
    transport = as_transport(cp_group)
    blocks = tokens.reshape(-1, split.block_size, *tokens.shape[1:])
    given, wanted = (0, -1) if step == 1 else (-1, 0)  # which token of a block another needs, which one needs another's
    held = split.blocks_by_rank(tokens.shape[0] * transport.size, transport.size, tokens.device)
    gathered = transport.all_gather(blocks[:, given].contiguous()).flatten(0, 1)
    in_order = torch.empty_like(gathered)
    in_order[held.flatten()] = gathered
    beyond = torch.roll(in_order, -step, dims=0)
    beyond[wanted] = 0
    rolled = torch.roll(blocks, -step, dims=1)
    rolled[:, wanted] = beyond[held[transport.rank]]
    return rolled.reshape(tokens.shape)


def _ended_at_documents(rolled: Tensor, dims: int, split: TokenSplit, cp_group: Any, packed_seq_params: Any) -> Tensor:
    """Return ``rolled`` with zero for the last token of each document, whose successor belongs to the next one."""
    seq_len = rolled.shape[dims] * cp_group.size()
    bounds = to_device(documents_of(packed_seq_params, seq_len=seq_len), rolled.device)
    ends_here = torch.zeros(seq_len + 1, dtype=torch.bool, device=rolled.device)
    ends_here[bounds.long()] = True
    ends = ends_here[split.positions(seq_len, cp_group.size(), cp_group.rank(), rolled.device) + 1]
    shape = [1] * rolled.dim()
    shape[dims] = -1
    return rolled.masked_fill(ends.view(shape), 0)


def scan_replacements(split: TokenSplit) -> list[Pair]:
    """Return the functions of Megatron that order tokens for layers that scan the sequence, each with its replacement.

    Mamba and gated delta layers have, between two all-to-alls, every token of the sequence for a part of their heads:
    rank after rank, each in its own order. Megatron undoes its zigzag split there and redoes it afterwards.

    Raises:
        MissingSymbolError: this Megatron-Core has no such function.
    """

    def _undo_attention_load_balancing(input_: Tensor, cp_size: int, packed_seq_params: Any = None) -> Tensor:
        """Reorder ``[seq_len, ...]`` from the order of the ranks to that of the sequence; a pack is split whole."""
        return input_.index_select(0, split.sequence_order(input_.shape[0], cp_size, input_.device))

    def _redo_attention_load_balancing(input_: Tensor, cp_size: int, packed_seq_params: Any = None) -> Tensor:
        """Reorder ``[seq_len, ...]`` from the order of the sequence to that of the ranks; a pack is split whole."""
        return input_.index_select(0, split.rank_order(input_.shape[0], cp_size, input_.device))

    def _build_thd_cp_a2a_perm(cu_seqlens: Tensor, cp_size: int, t_global: int) -> tuple[Tensor, Tensor]:
        """Return int64 ``[t_global]`` twice: rows to take for the order of the sequence, and for that of the ranks."""
        where = (t_global, cp_size, cu_seqlens.device)
        return split.sequence_order(*where), split.rank_order(*where)

    mamba, parameters = "megatron.core.ssm.mamba_context_parallel", ("input_", "cp_size", "packed_seq_params")
    pairs = [
        (require_symbol(mamba, function.__name__, parameters=parameters), function)
        for function in (_undo_attention_load_balancing, _redo_attention_load_balancing)
    ]
    gated_delta = "megatron.core.ssm.gated_delta_net.common"
    if has_module(gated_delta):  # releases that split gated delta layers over ranks
        parameters = ("cu_seqlens", "cp_size", "t_global")
        original = require_symbol(gated_delta, "_build_thd_cp_a2a_perm", parameters=parameters)
        pairs.append((original, _build_thd_cp_a2a_perm))
    return pairs


REPLACEMENTS = (rope_replacements, batch_replacements, roll_replacements, scan_replacements)
"""Functions of a TokenSplit that return what it replaces in Megatron, by what."""


def follow_layout(patches: Patches, split: TokenSplit) -> None:
    """Have Megatron split sequences by ``split`` wherever it assumes its own zigzag, until ``patches`` are undone.

    ``zigzag`` leaves Megatron's functions, which are right for it.

    Raises:
        MissingSymbolError: this Megatron-Core has no function of a name that is replaced; nothing is replaced then.
    """
    if split.layout != "zigzag":
        pairs = [pair for replacements in REPLACEMENTS for pair in replacements(split)]
        patches.replace(pairs, then=clear_rotary_tables)
