#!/usr/bin/env bash
# Asks a real Slurm controller whether it would run job scripts: sbatch --test-only against pretended nodes on loopback.
#
# usage: run_slurm.sh NODES GPUS CPUS MEMORY_MB SCRIPT...
# Prints one line a script: its exit code, a tab and what sbatch said.  Needs slurmctld, munged and root.
set -euo pipefail
nodes=$1 gpus=$2 cpus=$3 memory=$4
shift 4

work="$(mktemp -d)"
controller=''
finish() {
  [[ -z "$controller" ]] || { kill "$controller" && wait "$controller"; } 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT
mkdir -p "$work/state" "$work/spool"
chmod 755 "$work"
chown -R slurm "$work"

port=$((20000 + RANDOM % 20000))
cat > "$work/slurm.conf" <<CONF
ClusterName=pretended
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=slurm
AuthType=auth/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/pid
# Nodes of a cloud count as usable although nobody runs on them.
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
ResumeTimeout=600
# A request that no node can satisfy is refused at once.
EnforcePartLimits=ALL
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
NodeName=n[0001-$(printf %04d "$nodes")] NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory Gres=gpu:$gpus State=CLOUD
PartitionName=all Nodes=ALL Default=YES MaxTime=7-00:00:00 State=UP
CONF
printf 'NodeName=n[0001-%04d] Name=gpu Count=%d\n' "$nodes" "$gpus" > "$work/gres.conf"

# The controller and sbatch authenticate each other with munge; a daemon that runs already is used as it is.
if ! munge -n > /dev/null 2>&1; then
  mkdir -p /run/munge
  chown munge /run/munge
  su munge -s /bin/sh -c /usr/sbin/munged
  sleep 1
fi

export SLURM_CONF="$work/slurm.conf"
slurmctld -D -f "$SLURM_CONF" > "$work/log" 2>&1 &
controller=$!
for _ in $(seq 40); do
  [[ "$(scontrol ping 2>/dev/null)" == *UP* ]] && break
  sleep 0.25
done

for script in "$@"; do
  code=0
  said="$(sbatch --test-only "$script" 2>&1)" || code=$?
  printf '%s\t%s\n' "$code" "${said//$'\n'/ }"
done
