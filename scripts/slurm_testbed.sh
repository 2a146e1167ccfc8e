#!/usr/bin/env bash
# A real Slurm on this machine: one controller, virtual nodes with four fake GPUs each.
#
#   slurm_testbed.sh up DIR [NODES [PREFIX [PORT [cgroup|linuxproc]]]]    export SLURM_CONF=DIR/slurm.conf; sinfo
#   slurm_testbed.sh down DIR                                             ends what `up` started, jobs too
#
# Debian or Ubuntu, as root: slurmctld, slurmd, munge, installed when they are missing. Steps are held by a cgroup where this
# machine has the freezer of cgroup v1 (said in DIR/containment); elsewhere by parentage, which proves nothing.
# Several may run at once with their own PREFIX (of node names) and PORT (they take NODES + 1 from there).
set -eu
what=${1:-} dir=$(realpath -m "${2:?which folder}")

if [ "$what" = down ]; then
  export SLURM_CONF=$dir/slurm.conf
  if [ -s "$dir/run/slurmctld.pid" ] && kill -0 "$(cat "$dir/run/slurmctld.pid")" 2>/dev/null; then
    timeout 10 scancel --quiet -u root 2>/dev/null || true
    for _ in $(seq 50); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
  fi
  for file in "$dir"/run/slurmd.*.pid "$dir/run/slurmctld.pid" "$dir/munge/munged.pid"; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    kill -9 "$pid" 2>/dev/null || true # its state is of no more use, and a test may have stopped it
  done
  for group in $(cat "$dir/groups" 2>/dev/null); do
    [ -d "$group" ] && find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
  done
  exit 0
fi
[ "$what" = up ] || { sed -n '2,10p' "$0" >&2; exit 2; }
nodes=${3:-4} prefix=${4:-n} port=${5:-16817} contain=${6:-auto}

[ "$(id -u)" = 0 ] || { echo "a testbed of Slurm needs root" >&2; exit 77; }
if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
  command -v apt-get >/dev/null || { echo "Slurm is not installed, and there is no apt-get" >&2; exit 77; }
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -q && apt-get install -y -q --no-install-recommends slurmctld slurmd slurm-client munge; } >&2 ||
    { echo "Slurm cannot be installed here" >&2; exit 77; }
fi

freezer=/sys/fs/cgroup/freezer
if [ "$contain" = auto ]; then
  contain=linuxproc
  [ -w $freezer ] && mkdir $freezer/unbroken-try 2>/dev/null && rmdir $freezer/unbroken-try && contain=cgroup
fi
mkdir -p "$dir"/{munge,state,run,log,dev}
echo "$contain" >"$dir/containment"
names=() groups=()
for i in $(seq "$nodes"); do
  names+=("$prefix$i") groups+=("$freezer/slurm_$prefix$i")
  mkdir -p "$dir/spool/$prefix$i"
done
echo "${groups[@]}" >"$dir/groups"
# A GPU has to be a character device: a plain file puts the node into the state inval.
for i in 0 1 2 3; do [ -e "$dir/dev/nvidia$i" ] || mknod "$dir/dev/nvidia$i" c 1 3; done
head -c 1024 /dev/urandom >"$dir/munge/munge.key"
chown -R munge:munge "$dir/munge"
chmod 755 "$dir" "$dir/munge"
chmod 400 "$dir/munge/munge.key"

cat >"$dir/gres.conf" <<CONF
AutoDetect=off
NodeName=$prefix[1-$nodes] Name=gpu File=$dir/dev/nvidia[0-3]
CONF
cat >"$dir/cgroup.conf" <<CONF
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CONF
cat >"$dir/slurm.conf" <<CONF
ClusterName=testbed
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$dir/munge/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/$contain
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=5,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Short, so that tests are.
SlurmctldTimeout=10
SlurmdTimeout=10
InactiveLimit=0
KillWait=2
MinJobAge=300
JobRequeue=1
ReturnToService=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Virtual nodes have not the hardware that they say.
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=$prefix[1-$nodes] NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
CONF

runuser -u munge -- "$(command -v munged)" --socket="$dir/munge/munge.socket" --key-file="$dir/munge/munge.key" \
  --pid-file="$dir/munge/munged.pid" --log-file="$dir/munge/munged.log" --seed-file="$dir/munge/munged.seed"
export SLURM_CONF=$dir/slurm.conf
slurmctld -i -f "$SLURM_CONF"
for name in "${names[@]}"; do slurmd -N "$name" -f "$SLURM_CONF"; done
for _ in $(seq 100); do [ "$(sinfo -h -o %T 2>/dev/null | sort -u)" = idle ] && exit 0; sleep 0.1; done
sinfo >&2
tail -n 5 "$dir"/log/*.log >&2
echo "the nodes did not become idle" >&2
exit 1
