#!/bin/bash
#SBATCH --job-name=benchlib-squad-job-with-restarts
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --time=64
#SBATCH --output=/outputs/example/squad-job-with-restarts/logs/slurm.out
#SBATCH --chdir=/outputs/example/squad-job-with-restarts
#SBATCH --gres=gpu:8
#SBATCH --no-requeue
#SBATCH --exclusive

set -euo pipefail
export BENCHLIB_RUN_DIR=/outputs/example/squad-job-with-restarts
export PYTHONUNBUFFERED=1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

FIRST=$(hostname)  # this script runs on the first node
export FIRST
# shellcheck disable=SC2016  # the shell of each node reads its own number
srun --kill-on-bad-exit=1 --ntasks=2 --ntasks-per-node=1 bash -c 'PET_RDZV_ENDPOINT="$FIRST:29400" PET_RDZV_CONF="join_timeout=120,last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=5,is_host=$((SLURM_NODEID == 0))" exec python3 -m torch.distributed.run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id benchlib-squad-job-with-restarts --max-restarts 2 --monitor-interval 0.2 --log-dir /outputs/example/squad-job-with-restarts/logs/torchrun -m benchlib.runtime.worker /outputs/example/squad-job-with-restarts'
