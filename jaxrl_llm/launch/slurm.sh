#!/bin/bash
# A run on several machines under Slurm:
#
#   sbatch --nodes=2 jaxrl_llm/launch/slurm.sh --config configs/run.py --workdir /shared/runs/run
#
# What stands behind the script's name is the command line of jaxrl_llm.main. The work folder must be on a file system
# that all machines share, and the environment with jaxrl_llm must be active where sbatch is called (or set PYTHON).
# One process a GPU; --ntasks-per-node=1 makes one a machine, with all its GPUs.
#
#SBATCH --job-name=jaxrl_llm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# Slurm starts the job again when a machine fails or the job is preempted.
#SBATCH --requeue
# SIGTERM to every process, two minutes before the time is over: the step in progress is finished and saved.
#SBATCH --signal=TERM@120

set -u
PYTHON=${PYTHON:-python}
TRIES=${TRIES:-3}

for ((try = 1; try <= TRIES; try++)); do
  # One process less can't go on: the others are ended a minute later. Not at once (--kill-on-bad-exit): all leave with
  # the same code after SIGTERM, some a moment before the others, and that code must not become one of a signal.
  srun --label --wait=60 "$PYTHON" -m jaxrl_llm.main "$@"
  code=$?
  case $code in
    0 | 2 | 3) exit "$code" ;; # done; bad input; a check failed: another try would end alike
    75) # ended by SIGTERM after saving: the same job goes on later
      scontrol requeue "$SLURM_JOB_ID"
      exit 0
      ;;
  esac
  echo "try $try of $TRIES ended with exit code $code; the next goes on from the newest checkpoint" >&2
  sleep 10 # until the port of the coordinator is free
done
exit "$code"
