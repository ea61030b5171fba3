"""Unit tests of Megatron-LM that say something about this package, on how many ranks, and what does not apply."""

from __future__ import annotations

from dataclasses import dataclass, field

_TE = "TransformerEngine, which has no build for CPUs"
_PER_DOCUMENT = "the test cuts each packed document by zigzag; here a pack is cut as one sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tests that run together in one job."""

    name: str
    proves: str
    tests: tuple[str, ...]
    """Ids of pytest, relative to ``tests/unit_tests``."""

    ranks: int
    selected: bool
    """True if every model is built with this attention; else the package is loaded and nothing is chosen."""

    skipped: dict[str, str] = field(default_factory=dict)
    """Regular expressions over ids, and why those tests do not apply."""

    skipped_on_cpu: dict[str, str] = field(default_factory=dict)
    """The same, where there is no GPU."""


# Parameters of test_parallel_attention_correctness: gate, norm of queries and keys, TP, SP, CP, fused rope, packed.
SUITES = (
    Suite(
        name="attention",
        proves="outputs and input gradients on TP x CP ranks, striped, are those of one rank to 1e-2 in bfloat16",
        tests=(
            "transformer/test_attention.py::test_parallel_attention_correctness",
            "transformer/test_attention.py::test_parallel_attention_correctness_num_query_groups_less_than_tp_size",
        ),
        ranks=4,
        selected=True,
        skipped={r"\[\w+-\w+-\d-\w+-[24]-\w+-True\]": _PER_DOCUMENT},
        skipped_on_cpu={
            r"\[\w+-\w+-\d-True-|size\[\w+-True\]": f"sequence parallelism needs the norms of {_TE}",
            r"\[\w+-\w+-\d-\w+-\d-True-": f"fused rotary embeddings need {_TE}",
        },
    ),
    Suite(
        name="multi-token prediction",
        proves="models with prediction heads compute the same on striped ranks as on one; building one needs GPUs",
        tests=("transformer/test_multi_token_prediction.py::TestMultiTokenPrediction",),
        ranks=4,
        selected=True,
        skipped={
            "fp8": "attention runs in the dtype of its inputs",
        },
    ),
    Suite(
        name="groups",
        proves="Megatron's groups are made, ended and made again with the runtime following them",
        # The rest of test_parallel_state.py asks for eight ranks, or makes more groups than gloo has threads for.
        tests=(
            "test_parallel_state.py::test_context_parallel_rank",
            "test_parallel_state.py::test_data_parallel_initializations",
            "test_parallel_state.py::test_tensor_model_parallel_rank",
            "test_process_groups_config.py",
        ),
        ranks=4,
        selected=True,
    ),
    Suite(
        name="batch",
        proves="loading the package without choosing it leaves Megatron's zigzag split of batches as it was",
        tests=(
            "data/test_get_batch.py::test_get_batch_on_this_cp_rank_per_sequence_balancing",
            "data/test_get_batch.py::test_flatten_batch_for_packed_sequences",
            "data/test_get_batch.py::test_sft_batch",
        ),
        ranks=2,
        selected=False,
        skipped_on_cpu={r"test_sft_batch\[\d+-[24]-": f"the split by documents is done by {_TE}"},
    ),
    Suite(
        name="specs and flags",
        proves="loading the package without choosing it leaves attention, specs, flags and builders as they were",
        tests=(
            "transformer/test_spec_customization.py",
            "training/models/test_gpt_builder.py",
            "training/test_argument_utils.py",
            "test_argument_utils.py",
        ),
        ranks=2,
        selected=False,
        skipped_on_cpu={"test_spec_customization": f"the file imports {_TE}"},
    ),
)
