#!/bin/bash
# Pre-train on several hosts under SLURM: sbatch examples/slurm.sh
# One torchrun a host starts a rank for each GPU; a job that is requeued goes on from its latest checkpoint.
#SBATCH --job-name=llama
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail

# The first host of the job is where the ranks meet; its port follows from the job's number.
host=$(scontrol show hostnames "${SLURM_JOB_NODELIST}" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

# Restarted ranks of torch's rendezvous may not find each other without this (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_PER_NODE))

srun torchrun --nnodes "${SLURM_JOB_NUM_NODES}" --nproc-per-node "${SLURM_GPUS_PER_NODE}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "${SLURM_JOB_ID}" --rdzv-endpoint "${host}:${port}" \
    examples/pretrain.py --steps 100000 --run "${SLURM_SUBMIT_DIR}/runs/llama"
