#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300

# Five minutes before the time limit Slurm sends SIGUSR1 to this shell, which passes it on to the tasks. They save and end,
# and the job goes into the queue again, as it does up to three times after a failure. If Slurm preempts the job, it sends
# SIGTERM to the tasks and requeues the job itself.
trap 'is_signalled=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=${MASTER_PORT:-29500}
srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
    LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE exec python examples/launch/train.py --folder run "$@"' train "$@" &
wait $!
status=$?
if [ -n "$is_signalled" ]; then
    wait $! # the trap has interrupted the first one
    status=$?
fi
if [ -n "$is_signalled" ] || { [ $status -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
