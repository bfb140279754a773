#!/bin/bash
#SBATCH --job-name=benchlib-squad-job
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --time=64
#SBATCH --output=/outputs/example/squad-job/logs/slurm.out
#SBATCH --chdir=/outputs/example/squad-job
#SBATCH --gres=gpu:8
#SBATCH --no-requeue
#SBATCH --exclusive

set -euo pipefail
export BENCHLIB_RUN_DIR=/outputs/example/squad-job
export PYTHONUNBUFFERED=1

srun --kill-on-bad-exit=1 python3 -m benchlib.runtime.worker /outputs/example/squad-job
