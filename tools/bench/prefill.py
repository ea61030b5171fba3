"""Time to the first token: whole prefills of a model of random weights, dense and sparse, by length.

    python -m tools.bench.prefill                                        # Qwen2.5-3B's shape, 8K to 512K, on a GPU
    python -m tools.bench.prefill --device cpu --dtype float32 --shape tiny --lengths 1K,2K --output /tmp/prefill.json

A prefill reads all tokens, fills the cache of keys and values and returns the likeliest next token to the host. Dense
attention is torch's, once with cuDNN and once with flash attention; speed-ups are over the faster of the two. Sparse
attention selects lists of fixed lengths, half of the pairs by columns and half by distances; the lengths are set so
that the measured density is that of ``--densities``. Selection is part of the time.

A prefill that would take longer than ``--longest-s`` runs its first layers only, once one and once ``PARTIAL``: layers
have equal sizes, so the time of all follows, and the memory is that of the cache which the others would fill more.
``layers`` in the results says how many ran.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config

from megatron_mtraining import MTrainingConfig, hf
from megatron_mtraining.arguments import CommandParser
from megatron_mtraining.console import check_file, list_of, num_tokens, number, text_table, whole_number

from .report import DEFAULT_FOLDER, commit_of_checkout

SHAPES = {
    "qwen2.5-3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash-attention": SDPBackend.FLASH_ATTENTION}
PARTIAL = 4
"""Layers that run where all would take too long."""

CORRECTIONS = 2
"""Corrections of the lengths of the lists, each by the two densities measured before."""


def register_dense(name: str, device: str, dtype: torch.dtype) -> None:
    """Register dense causal attention by one of torch's kernels; one without shared key/value heads gets copies."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, enable_gqa: bool) -> Tensor:
        with sdpa_kernel(DENSE[name]):
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa)

    few = [torch.zeros(1, heads, 128, 128, device=device, dtype=dtype) for heads in (2, 1, 1)]
    try:
        attend(*few, None, True)
        shares = True
    except RuntimeError:
        shares = False

    def attention(
        _: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **__: object
    ) -> tuple[Tensor, None]:
        if not shares:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return attend(query, key, value, scaling, shares).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_registered(name), attention)


def _registered(name: str) -> str:
    """Name in transformers, which looks for packages by names with flash."""
    return f"dense_{list(DENSE).index(name)}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Time and memory of one attention at one length."""

    attention: str
    length: int
    seconds: float
    """Median of the whole prefill; from some layers where ``layers`` is less than the model has."""

    runs: int
    layers: int
    peak_gib: float | None
    """Peak of the device's memory, weights and cache included; None on a CPU."""

    density: float
    columns: int | None = None
    distances: int | None = None


class Prefill:
    """A model, and prefills of it."""

    def __init__(self, shape: str, longest: int, device: str, dtype: torch.dtype) -> None:
        """Make random weights for texts of up to ``longest`` tokens."""
        torch.manual_seed(0)
        config = Qwen2Config(**SHAPES[shape], max_position_embeddings=longest, rope_theta=1e6)
        with torch.device(device):
            self.model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.layers: int = config.num_hidden_layers
        self._shares: dict[float, float] = {}  # lists of the last length by their density: nearly those of the next one
        self.device, self.on_gpu = device, device.startswith("cuda")

    @torch.no_grad()
    def run(self, ids: Tensor, layers: int) -> tuple[float, float | None]:
        """Return seconds and peak GiB of a prefill through the first layers."""
        self.model.config.num_hidden_layers = layers
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        began = time.perf_counter()
        self.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().item()
        seconds = time.perf_counter() - began
        return seconds, torch.cuda.max_memory_allocated() / 2**30 if self.on_gpu else None

    def measure(
        self, ids: Tensor, *, expected_s: float, longest_s: float, repeats: int
    ) -> tuple[float, float | None, int, int]:
        """Return seconds, peak GiB, runs and layers; the first pass, of one layer, is not timed."""
        self.run(ids, 1)
        if expected_s <= longest_s:
            samples = [self.run(ids, self.layers)]
            while len(samples) < repeats and sum(seconds for seconds, _ in samples) < longest_s / 2:
                samples.append(self.run(ids, self.layers))
            return statistics.median(seconds for seconds, _ in samples), samples[-1][1], len(samples), self.layers
        (one, _), (some, peak) = self.run(ids, 1), self.run(ids, PARTIAL)
        if peak is not None:
            peak += (self.layers - PARTIAL) * self._cache_bytes(ids.shape[1]) / 2**30
        return one + (some - one) / (PARTIAL - 1) * (self.layers - 1), peak, 1, PARTIAL

    def _cache_bytes(self, length: int) -> int:
        """Bytes of keys and values of one layer."""
        config = self.model.config
        head_dim = config.hidden_size // config.num_attention_heads
        return 2 * length * config.num_key_value_heads * head_dim * self.model.dtype.itemsize

    def density(self, ids: Tensor) -> float:
        """Mean density of the first layers' selections."""
        seen = hf.LayerMetrics()
        with hf.observe(seen):
            self.run(ids, PARTIAL)
        return statistics.fmean(seen.density.values())

    def configure_fixed(self, ids: Tensor, target: float) -> tuple[MTrainingConfig, float]:
        """Set lists of fixed lengths whose density is ``target``; return them, and the density that they have."""
        length = ids.shape[1]

        def configure(share: float) -> tuple[MTrainingConfig, float]:
            lists = {"max_vertical": round(share / 2 * length), "max_slash": round(share / 2 * length / 64)}
            config = MTrainingConfig(budget="fixed", dense_below=0, **lists)
            hf.configure(self.model, config)
            return config, self.density(ids)

        last, last_density, share = 0.0, 0.0, self._shares.get(target, target)
        config, density = configure(share)
        for _ in range(CORRECTIONS):
            if density == last_density:
                break
            following = max(target / 8, share + (target - density) * (share - last) / (density - last_density))
            last, last_density, share = share, density, following
            config, density = configure(share)
        self._shares[target] = share
        return config, density


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the results after each length."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        output = options.output or _default_output(options)
        check_file("--output", output)
    except ValueError as error:
        parser.error(str(error))
    dtype = getattr(torch, options.dtype)
    for name in DENSE:
        register_dense(name, options.device, dtype)
    prefill = Prefill(options.shape, max(options.lengths), options.device, dtype)
    rows: list[Row] = []
    absent: dict[str, str] = {}
    expected: dict[str, float] = {}
    names = [*DENSE, *(f"mtraining {density:.0%}" for density in options.densities)]
    stamp = _stamp(options, argv)
    for length in sorted(options.lengths):
        ids = torch.randint(
            0, prefill.model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)
        ).to(options.device)
        for name, density in zip(names, [None] * len(DENSE) + options.densities, strict=True):
            try:
                row = _row(prefill, name, density, ids, expected.get(name, 0.0), options)
            except RuntimeError as error:  # no such kernel, or not enough memory
                absent[f"{name}, {length}"] = str(error).splitlines()[0]
                continue
            expected[name] = 4 * row.seconds  # of the next length, at most
            rows.append(row)
        print(f"{length} tokens measured", file=sys.stderr, flush=True)
        output.write_text(
            json.dumps(stamp | {"rows": [asdict(row) for row in rows], "absent": absent}, indent=1) + "\n"
        )
    print("\n".join([*table(rows), *(f"{name}: not measured. {why}" for name, why in absent.items())]))


def _row(
    prefill: Prefill, name: str, density: float | None, ids: Tensor, expected_s: float, options: argparse.Namespace
) -> Row:
    config, measured = None, 1.0
    if density is None:
        prefill.model.set_attn_implementation(_registered(name))
    else:
        config, measured = prefill.configure_fixed(ids, density)
    seconds, peak, runs, layers = prefill.measure(
        ids, expected_s=expected_s, longest_s=options.longest_s, repeats=options.repeats
    )
    return Row(
        attention=name,
        length=ids.shape[1],
        seconds=seconds,
        runs=runs,
        layers=layers,
        peak_gib=peak,
        density=measured,
        columns=None if config is None else config.max_vertical,
        distances=None if config is None else config.max_slash,
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Return lines with times, speed-ups over the faster dense attention of the same length, and memory."""
    dense: dict[int, float] = {}
    for row in rows:
        if row.attention in DENSE:
            dense[row.length] = min(row.seconds, dense.get(row.length, row.seconds))
    cells = [
        [
            str(row.length),
            row.attention,
            f"{row.density:.1%}",
            f"{row.seconds:.3f}",
            f"{dense[row.length] / row.seconds:.2f}" if row.length in dense else "",
            "" if row.peak_gib is None else f"{row.peak_gib:.1f}",
            str(row.layers),
            str(row.runs),
        ]
        for row in rows
    ]
    headings = ["tokens", "attention", "density", "first token s", "times dense", "peak GiB", "layers run", "runs"]
    return text_table(headings, cells)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m tools.bench.prefill", description=__doc__)
    lengths = [2**power for power in range(13, 20)]
    parser.add_argument("--lengths", type=list_of(num_tokens(2**22)), default=lengths, metavar="N,...")
    parser.add_argument("--densities", type=list_of(number(1e-4, 1)), default=[0.1, 0.2], metavar="SHARE,...")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-3b")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=whole_number(1, 100), default=3, help="timed prefills, fewer of long ones")
    parser.add_argument("--longest-s", type=number(0, 1e5), default=12.0, help="seconds of the longest whole prefill")
    parser.add_argument("--output", type=Path, help="default: in docs/benchmarks/prefill/")
    parser.add_argument("--commit", help="default: that of the checkout")
    return parser


def _default_output(options: argparse.Namespace) -> Path:
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    hardware = name.lower().replace("nvidia ", "").replace(" ", "-")
    return DEFAULT_FOLDER / "prefill" / f"{options.shape}_{hardware}_{datetime.date.today().isoformat()}.json"


def _stamp(options: argparse.Namespace, argv: Sequence[str] | None) -> dict[str, object]:
    given = sys.argv[1:] if argv is None else argv
    return {
        "command": " ".join(["python -m tools.bench.prefill", *given]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": options.commit or commit_of_checkout(),
        "gpu": torch.cuda.get_device_name() if options.device.startswith("cuda") else None,
        "torch": torch.__version__,
        "shape": SHAPES[options.shape],
        "dtype": options.dtype,
    }


if __name__ == "__main__":
    main()
