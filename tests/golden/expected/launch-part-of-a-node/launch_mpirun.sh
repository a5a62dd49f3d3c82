#!/usr/bin/env bash
# llama3-8b by Open MPI: start it on the first node only; mpirun reaches the nodes of mpi_hosts over ssh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

HEAD_NODE="${HEAD_NODE:-$(awk 'NR == 1 { print $1 }' mpi_hosts)}"
HEAD_PORT="${HEAD_PORT:-29500}"
export HEAD_NODE HEAD_PORT

# Open MPI hands no variables on by itself; a node without them would run something else.
PASSED=(-x PATH -x HEAD_NODE -x HEAD_PORT)
SETTINGS=(TRAIN_SCRIPT)
for name in "${SETTINGS[@]}"; do
  if [[ -n "${!name:-}" ]]; then PASSED+=(-x "$name"); fi
done

# One process a node, in the order of the list: its number fixes which node holds which ranks.  Without --bind-to none
# Open MPI would hold all ranks of a node on one core.
# shellcheck disable=SC2016  # the number is for the process's shell, not for this one
exec mpirun \
  -np 1 \
  --hostfile mpi_hosts \
  --map-by ppr:1:node \
  --bind-to none \
  "${PASSED[@]}" \
  bash -c 'NODE_RANK="$OMPI_COMM_WORLD_RANK" exec bash ./launch.sh "$@"' launch "$@"
