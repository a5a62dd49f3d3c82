#!/usr/bin/env bash
# A real Slurm on loopback, for one call.
#
#   run_slurm.sh check NODES GPUS CPUS MEMORY_MB SCRIPT...   would the controller run these job scripts on such nodes?
#       One line a script: the exit code of `sbatch --test-only`, a tab and what sbatch said.  Nobody runs on the nodes.
#   run_slurm.sh run FOLDER GPUS                             runs FOLDER/job.sbatch on two nodes of this machine
#       Exits as the job did.  GPUs are empty files: Slurm counts and hands them out, nothing opens them.
#   run_slurm.sh nodes GPUS COMMAND...                       runs a command where such nodes are up; exits as it did
#   run_slurm.sh beside NODES GPUS CPUS MEMORY_MB COMMAND... runs a command beside a controller; nobody runs on the nodes
#
# With JOB_SUBMIT_LUA, a file, the controller asks that script about every job.
# Needs slurmctld, munged (and slurmd to run) and root.
set -euo pipefail
mode=$1
shift

work="$(mktemp -d)"
daemons=()
finish() {
  for daemon in "${daemons[@]}"; do
    kill "$daemon"
    wait "$daemon"
  done 2> /dev/null || true
  rm -rf "$work"
}
trap finish EXIT
mkdir -p "$work/state" "$work/spool"
chmod 755 "$work"
chown -R slurm "$work"
port=$((20000 + RANDOM % 20000))
export SLURM_CONF="$work/slurm.conf"

# What both modes have in common: the controller, and jobs that share nodes by cores, memory and GPUs.
cat > "$SLURM_CONF" <<CONF
ClusterName=loopback
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool/%n
SlurmctldPidFile=$work/controller.pid
SlurmdPidFile=$work/%n.pid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
# A submission may wait for the planner where the machine is busy (Slurm: 10 s).
MessageTimeout=60
# A request that no node can satisfy is refused at once.
EnforcePartLimits=ALL
PartitionName=all Nodes=ALL Default=YES MaxTime=7-00:00:00 State=UP
CONF

# start NAME COMMAND...: a daemon, with its log kept until the end.
start() {
  local name=$1
  shift
  "$@" > "$work/$name.log" 2>&1 &
  daemons+=("$!")
}

# Programs of Slurm authenticate each other with munge; this run has a daemon of its own, which ends with it.
authenticate() {
  install -d -o munge -m 755 "$work/munge"
  start munge setpriv --reuid munge --regid munge --clear-groups /usr/sbin/munged --foreground --force \
    --socket "$work/munge/socket" --pid-file "$work/munge/pid" --seed-file "$work/munge/seed"
  for _ in $(seq 40); do
    munge -n -S "$work/munge/socket" > /dev/null 2>&1 && return
    sleep 0.25
  done
  cat "$work/munge.log" >&2
  return 1
}

controller() {
  if [[ -n "${JOB_SUBMIT_LUA:-}" ]]; then
    # The plugin looks for this name beside slurm.conf.
    install -m 644 "$JOB_SUBMIT_LUA" "$work/job_submit.lua"
    echo "JobSubmitPlugins=lua" >> "$SLURM_CONF"
  fi
  authenticate
  start controller slurmctld -D -f "$SLURM_CONF"
  for _ in $(seq 40); do
    [[ "$(scontrol ping 2> /dev/null)" == *UP* ]] && return
    sleep 0.25
  done
  cat "$work/controller.log" >&2
  return 1
}

# Nodes of a cloud count as usable although nobody runs on them.
cloud() {
  local nodes=$1 gpus=$2 cpus=$3 memory=$4
  cat >> "$SLURM_CONF" <<CONF
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
ResumeTimeout=600
SlurmdPort=$((port + 1))
NodeName=n[0001-$(printf %04d "$nodes")] NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory Gres=gpu:$gpus State=CLOUD
CONF
  printf 'NodeName=n[0001-%04d] Name=gpu Count=%d\n' "$nodes" "$gpus" > "$work/gres.conf"
}

beside() {
  cloud "${@:1:4}"
  controller
  "${@:5}"
}

check() {
  local script code said
  cloud "${@:1:4}"
  shift 4
  controller
  for script in "$@"; do
    code=0
    said="$(sbatch --test-only "$script" 2>&1)" || code=$?
    printf '%s\t%s\n' "$code" "${said//$'\n'/ }"
  done
}

# Two nodes of this machine, up and idle.
start_nodes() {
  local gpus=$1 node index first
  # The leading node must have a name that resolves, and come first in the order of names.
  first="$(hostname -s)"
  cat >> "$SLURM_CONF" <<CONF
ProctrackType=proctrack/pgid
TaskPlugin=task/affinity
# Tasks are bound to the cores they asked for, as on many clusters: who asks for none gets one.
TaskPluginParam=autobind=cores
SlurmdParameters=config_overrides
NodeName=$first NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=2 RealMemory=2000 Gres=gpu:$gpus
NodeName=zz2 NodeHostname=$first NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=2 RealMemory=2000 Gres=gpu:$gpus
CONF
  for node in "$first" zz2; do
    for (( index = 0; index < gpus; index++ )); do
      touch "$work/gpu$index"
      echo "NodeName=$node Name=gpu File=$work/gpu$index"
    done
  done > "$work/gres.conf"
  controller
  for node in "$first" zz2; do
    start "$node" slurmd -D -N "$node" -f "$SLURM_CONF"
  done
  for _ in $(seq 40); do
    [[ "$(sinfo -h -o %T)" == idle ]] && break
    sleep 0.25
  done
}

nodes() {
  local code=0
  start_nodes "$1"
  "${@:2}" || code=$?
  if (( code )); then tail -n 20 "$work"/*.log >&2; fi
  return "$code"
}

run() {
  local folder=$1 code=0
  start_nodes "$2"
  cd "$folder"
  sbatch --wait --time=2 job.sbatch || code=$?
  if (( code )); then tail -n 20 "$work"/*.log; fi
  return "$code"
}

"$mode" "$@"
