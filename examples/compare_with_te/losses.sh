#!/usr/bin/env bash
# Loss curves on real text: TransformerEngine's dense attention, ours with every key, and ours with keys selected.
#
#   MEGATRON_LM=path/to/Megatron-LM TEXT=folder/of/text/files GPUS=4 examples/compare_with_te/losses.sh
#
# Two dense runs compute the same by two ways (p2p and all_gather; on one GPU its fused and unfused attention): how far
# they drift apart is what rounding in bfloat16 does, and what ours with every key is judged by. Variables and the
# output are in README.md beside this file.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
: "${MEGATRON_LM:?must be the folder of a Megatron-LM tree, got nothing. Set it in the environment.}"
: "${TEXT:?must be a folder of text files, got nothing. Set it in the environment.}"

GPUS=${GPUS:-4}
second=dense_all_gather
[[ $GPUS != 1 ]] || second=dense_unfused
RUNS=${RUNS:-"dense $second every_key selected"}
SEQ_LENGTH=${SEQ_LENGTH:-32768}
ITERATIONS=${ITERATIONS:-200}
RUN_TIMEOUT=${RUN_TIMEOUT:-600}
OUTPUT=${OUTPUT:-outputs/losses}
PYTHON=${PYTHON:-python3}
read -r -a extra_args <<<"${EXTRA_ARGS:-}"
read -r -a run_by <<<"${RUN_BY:-}"

export PYTHONPATH="$MEGATRON_LM:$repository${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_DEVICE_MAX_CONNECTIONS=1   # Megatron's order of communication and computation
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

options=(
    --num-layers 6 --hidden-size 512 --ffn-hidden-size 1408
    --num-attention-heads 8 --group-query-attention --num-query-groups 2 --kv-channels 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" --context-parallel-size "$GPUS"
    --tokenizer-type NullTokenizer --vocab-size 257 --split "100,0,0"
    --bf16 --micro-batch-size 1 --global-batch-size 1 --train-iters "$ITERATIONS" --seed 1234
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --use-distributed-optimizer
    --no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader
    --eval-iters 0 --eval-interval 1000000 --log-interval 1 --distributed-timeout-minutes 5
)

# train RUN: one curve, with both streams in the log.
train() {
    local launcher=() selected=()
    case $1 in
        dense) selected=(--cp-comm-type p2p) ;;
        dense_all_gather) selected=(--cp-comm-type all_gather) ;;
        dense_unfused) selected=(--attention-backend unfused) ;;
        every_key) launcher=(-m megatron_mtraining) selected=(--mtraining-dense-below "$SEQ_LENGTH") ;;
        selected) launcher=(-m megatron_mtraining) selected=(--mtraining-dense-below 0) ;;
        *) echo "RUNS must be of dense, dense_all_gather, dense_unfused, every_key and selected, got $1." >&2 && return 2 ;;
    esac
    [[ ${#launcher[@]} -eq 0 ]] || selected+=(--attention-backend mtraining)
    timeout --kill-after 20 "$RUN_TIMEOUT" \
        "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" \
        "${run_by[@]}" "${launcher[@]}" "$MEGATRON_LM/pretrain_gpt.py" "${options[@]}" \
        --data-path "$OUTPUT/tokens" --data-cache-path "$OUTPUT/cache_$1" "${selected[@]}" "${extra_args[@]}"
}

mkdir -p "$OUTPUT"
[[ -f $OUTPUT/tokens.idx ]] || "$PYTHON" "$here/text_to_tokens.py" "$TEXT" "$OUTPUT/tokens"
for run in $RUNS; do
    echo "training $run, at most $RUN_TIMEOUT s: $OUTPUT/$run.log"
    train "$run" >"$OUTPUT/$run.log" 2>&1 || echo "$run ended with status $?: see its log" >&2
done
"$PYTHON" "$here/losses.py" "$OUTPUT"
