#!/bin/bash
# Run this on each of one to four machines, at any time: elastic.sh HOST [OPTIONS], where HOST is one that stays.
# When machines come or go, torchrun starts all processes again. Before that it sends SIGTERM, and they save.
# Status 1 tells torchrun on the machines that are left to start again, where only some of them are told to stop.
# torch 2.13 needs the variable: with one store for all rounds, agents read what was agreed in an earlier one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes 1:4 --nproc-per-node "${PROCESSES:-8}" --max-restarts 10 \
    --rdzv-backend c10d --rdzv-endpoint "$1" --rdzv-id "${JOB:-train}" "${@:2}" \
    "$(dirname "$0")/train.py" --folder "${FOLDER:-run}" --steps "${STEPS:-1000}" --status 1
