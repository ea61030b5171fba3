#!/usr/bin/env bash
#SBATCH --job-name=qwen2.5-3b-512k
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#
#   MEGATRON_LM=... EXTEND=outputs/qwen2.5-3b sbatch examples/qwen2.5-3b-512k/slurm_4x8.sh [more flags]
#
# EXTEND is the output folder in which examples.extend_context's prepare_model and prepare_data left weights and data; a
# file system that all nodes share. Checkpoints go to CHECKPOINTS, $EXTEND/runs/512k/checkpoints, where its export finds
# them; a second job continues from the last one. sbatch runs a copy of this file, so it is submitted from the root of
# this repository.
set -euo pipefail

: "${MEGATRON_LM:?must be the folder of a Megatron-LM tree, got nothing. Set it in the environment.}"
: "${EXTEND:?must be the output folder of prepare_model and prepare_data, got nothing.}"
CHECKPOINTS=${CHECKPOINTS:-$EXTEND/runs/512k/checkpoints}

repository=${SLURM_SUBMIT_DIR:-$PWD}
PYTHON=${PYTHON:-python3}
PORT=${PORT:-29500}
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

export PYTHONPATH="$MEGATRON_LM:$repository${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Megatron's fused gradient accumulation is apex's, and on by default. All nodes have what this one has.
fusion=()
"$PYTHON" -c "import torch, fused_weight_gradient_mlp_cuda" 2>/dev/null || fusion=(--no-gradient-accumulation-fusion)

# Weights and prefixes of the prepared data, and the weights to begin with unless a job has saved its own.
data=$("$PYTHON" -m examples.extend_context.prepare_data "$EXTEND/data")
read -r -a data <<<"$data"
start=(--load "$EXTEND/model_megatron" --finetune)
[[ ! -f $CHECKPOINTS/latest_checkpointed_iteration.txt ]] || start=(--load "$CHECKPOINTS")

# One launcher a node. Ranks are numbered node by node, so the 8 whose keys are gathered share a node.
srun --kill-on-bad-exit=1 \
    "$PYTHON" -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$head_node:$PORT" --rdzv-id "$SLURM_JOB_ID" \
    -m megatron_mtraining --config "$repository/examples/qwen2.5-3b-512k/run.yaml" "$MEGATRON_LM/pretrain_gpt.py" \
    --train-data-path "${data[@]}" --data-cache-path "$EXTEND/runs/512k/data_cache" \
    --tokenizer-type NullTokenizer --vocab-size 151936 \
    "${start[@]}" --save "$CHECKPOINTS" "${fusion[@]}" "$@"
