#!/usr/bin/env bash
# TransformerEngine's context parallelism and this package's, one after the other on the same GPUs and the same model.
#
#   MEGATRON_LM=path/to/Megatron-LM GPUS=4 examples/compare_with_te/run.sh
#
# Variables and the expected output are in README.md beside this file. A run that fails does not stop the others.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
: "${MEGATRON_LM:?must be the folder of a Megatron-LM tree, got nothing. Set it in the environment.}"

GPUS=${GPUS:-4}
SEQ_LENGTHS=${SEQ_LENGTHS:-"131072 524288"}
CONTENDERS=${CONTENDERS:-"transformer_engine mtraining mtraining_cost"}
ITERATIONS=${ITERATIONS:-8}
WARM_UP=${WARM_UP:-3}
DENSITY=${DENSITY:-0.05}
MAX_VERTICAL=${MAX_VERTICAL:-1024}
RUN_TIMEOUT=${RUN_TIMEOUT:-240}
OUTPUT=${OUTPUT:-outputs/compare_with_te}
PYTHON=${PYTHON:-python3}
read -r -a extra_args <<<"${EXTRA_ARGS:-}"
read -r -a run_by <<<"${RUN_BY:-}"

export PYTHONPATH="$MEGATRON_LM:$repository${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_DEVICE_MAX_CONNECTIONS=1   # Megatron's order of communication and computation
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

model=(
    --num-layers 4 --hidden-size 2048 --ffn-hidden-size 11008
    --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 128
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 31999
)
training=(
    --bf16 --micro-batch-size 1 --global-batch-size 1 --train-iters "$ITERATIONS" --mock-data
    --lr 1e-6 --min-lr 1e-6 --lr-decay-style constant --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader
    --context-parallel-size "$GPUS" --eval-iters 0 --eval-interval 1000000
    --log-interval 1 --log-throughput --distributed-timeout-minutes 5
)

# flags_of CONTENDER SEQ_LENGTH: what tells a contender from the others.
flags_of() {
    local counts ring="--mtraining-layout striped --mtraining-schedule hierarchical"
    case $1 in
        transformer_engine) echo "--cp-comm-type p2p" && return ;;
        mtraining) echo "$ring" ;;
        mtraining_cost) echo "--attention-backend mtraining --mtraining-max-density $DENSITY $ring" && return ;;
        mtraining_zigzag) echo "${ring/striped/zigzag}" ;;
        mtraining_flat) echo "${ring/hierarchical/flat}" ;;
        mtraining_node_striped) echo "${ring/striped/node_striped}" ;;
        mtraining_kv_group) echo "$ring --mtraining-index-sharing kv_group" ;;
        moba | xattention) echo "$ring --mtraining-pattern $1" ;;
        dense) echo "${ring/striped/zigzag} --mtraining-pattern dense" ;;
        *) echo "CONTENDERS must be of those in README.md, got $1." >&2 && return 2 ;;
    esac
    echo "--attention-backend mtraining"
    if [[ $1 == mtraining* ]]; then
        counts=$("$PYTHON" "$here/comparison.py" counts --seq-length "$2" \
            --density "$DENSITY" --max-vertical "$MAX_VERTICAL") || return
        echo "--mtraining-budget fixed $counts --mtraining-estimator last_window --mtraining-num-probe-rows 64"
        echo "--mtraining-sink-tokens 128 --mtraining-local-blocks 8"
    fi
}

# launch CONTENDER SEQ_LENGTH: trains, with both streams in the log; the exit status is that of the training.
launch() {
    local contender=$1 seq_length=$2 launcher=() selected=() flags=() words
    words=$(flags_of "$contender" "$seq_length") || return
    read -r -d '' -a selected <<<"$words" || true   # all lines; it ends at the end of the input
    [[ $contender == transformer_engine ]] || launcher=(-m megatron_mtraining)
    flags=(
        "${model[@]}" "${training[@]}" --seq-length "$seq_length" --max-position-embeddings "$seq_length"
        "${selected[@]}" "${extra_args[@]}"
    )
    printf '%s\n' "${flags[@]}" >"$OUTPUT/${contender}_${seq_length}.flags"
    timeout --kill-after 20 "$RUN_TIMEOUT" \
        "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" \
        "${run_by[@]}" "${launcher[@]}" "$MEGATRON_LM/pretrain_gpt.py" "${flags[@]}"
}

mkdir -p "$OUTPUT"
rm -f "$OUTPUT"/*.log "$OUTPUT"/*.status "$OUTPUT"/*.flags
for seq_length in $SEQ_LENGTHS; do
    for contender in $CONTENDERS; do
        log=$OUTPUT/${contender}_${seq_length}.log
        echo "running $contender at $seq_length tokens on $GPUS ranks, at most $RUN_TIMEOUT s: $log"
        status=0
        launch "$contender" "$seq_length" >"$log" 2>&1 || status=$?
        echo "$status" >"${log%.log}.status"
    done
done
"$PYTHON" "$here/comparison.py" table "$OUTPUT" --warm-up "$WARM_UP"
