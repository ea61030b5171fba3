#!/usr/bin/env bash
# The same configuration cut down to one node: four layers, mock data, a shorter sequence. Two to four minutes.
#
#   MEGATRON_LM=path/to/Megatron-LM GPUS=4 examples/qwen2.5-3b-512k/smoke.sh [more flags of pretrain_gpt.py]
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${MEGATRON_LM:?must be the folder of a Megatron-LM tree, got nothing. Set it in the environment.}"

GPUS=${GPUS:-4}
SEQ_LENGTH=${SEQ_LENGTH:-131072}
ITERATIONS=${ITERATIONS:-10}
PYTHON=${PYTHON:-python3}
read -r -a run_by <<<"${RUN_BY:-}"

export PYTHONPATH="$MEGATRON_LM:$here/../..${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Megatron's fused gradient accumulation is apex's, and on by default.
fusion=()
"$PYTHON" -c "import torch, fused_weight_gradient_mlp_cuda" 2>/dev/null || fusion=(--no-gradient-accumulation-fusion)

exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" \
    "${run_by[@]}" -m megatron_mtraining --config "$here/run.yaml" "$MEGATRON_LM/pretrain_gpt.py" \
    --num-layers 4 --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" \
    --context-parallel-size "$GPUS" --hierarchical-context-parallel-sizes "$GPUS" 1 \
    --global-batch-size 1 --train-iters "$ITERATIONS" --lr-warmup-iters 1 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 151935 "${fusion[@]}" "$@"
