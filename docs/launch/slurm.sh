#!/bin/bash
# Two nodes of 8 GPUs: sbatch docs/launch/slurm.sh runs/NAME
# The runs lie on a disk that all nodes share (GRPO_NB_RUNS). When time is up or the job is
# preempted, SIGTERM lets the step end and saves a checkpoint; --requeue goes on from it.
#SBATCH --job-name=grpo-nb
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail

RUN=${1:?which run: sbatch docs/launch/slurm.sh runs/NAME}
GPUS=8
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=4 TOKENIZERS_PARALLELISM=false

srun --kill-on-bad-exit=1 python -m torch.distributed.run \
  --nnodes "$SLURM_NNODES" --nproc_per_node "$GPUS" \
  --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$HEAD:29500" \
  -m grpo_nb train "$RUN" --processes $((SLURM_NNODES * GPUS))
