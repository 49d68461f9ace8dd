# shellcheck shell=bash
# The configuration of the test cluster; cluster.sh reads this file and sets the variables.
# shellcheck disable=SC2154  # they are set there

# Standard input becomes FILE. A cluster that runs keeps its configuration.
put() {
  cat >"$1.new"
  if ! cmp -s "$1.new" "$1"; then
    if [ -e "$1" ] && [ -n "$(pids slurmctld)$(pids slurmd)$(pids slurmdbd)" ]; then
      rm "$1.new"
      refuse "the cluster in $dir does not run with the $(basename "$1") that this script writes: 'cluster.sh down' first"
    fi
    mv "$1.new" "$1"
  fi
  rm -f "$1.new"
}

# Cgroups below a directory of our own in each controller, reached by links, so that clusters with equal node names do not meet there.
# Prints "enforced", or "none: " and why.
make_cgroups() {
  local controller
  [ "${CLUSTER_LIMITS:-}" != no ] || { echo "none: CLUSTER_LIMITS=no" && return; }
  for controller in memory devices freezer; do
    if ! { [ -e "/sys/fs/cgroup/$controller/tasks" ] && mkdir -p "/sys/fs/cgroup/$controller/$name" 2>/dev/null; }; then
      remove_cgroups
      echo "none: this machine has no cgroup v1 controller \"$controller\""
      return
    fi
    ln -sfn "/sys/fs/cgroup/$controller/$name" "$dir/cgroup/$controller"
  done
  echo enforced
}

remove_cgroups() {
  local root try state
  for root in /sys/fs/cgroup/*/"$name"; do
    [ -d "$root" ] || continue
    while read -r state; do echo THAWED >"$state"; done < <(find "$root" -name freezer.state)
    for try in $(seq 50); do  # the kernel needs a moment after the last process
      find "$root" -depth -type d -exec rmdir {} + 2>/dev/null
      [ -d "$root" ] || break
      sleep "0.$((try / 10))"
    done
  done
}

write_config() {
  local version limits track=proctrack/linuxproc task=task/none cgroups="" i
  [[ $(slurmctld -V) =~ ([0-9]+)\.([0-9]+) ]] || fail "cannot read the version in '$(slurmctld -V)'"
  version=$((10#${BASH_REMATCH[1]} * 100 + 10#${BASH_REMATCH[2]}))
  limits=$(make_cgroups)
  put "$dir/limits" <<<"$limits"
  if [ "$limits" = enforced ]; then
    track=proctrack/cgroup task=task/cgroup
    cgroups="CgroupMountpoint=$dir/cgroup"$'\n'ConstrainRAMSpace=yes$'\n'ConstrainDevices=yes
    [ $version -lt 2108 ] || cgroups+=$'\n'CgroupPlugin=cgroup/v1
  elif [ $version -ge 2405 ]; then
    cgroups=CgroupPlugin=disabled
  elif [ $version -ge 2108 ]; then
    cgroups=CgroupPlugin=cgroup/v1  # does nothing by itself; the one for v2 would want a scope of systemd's
  fi
  put "$dir/cgroup.conf" <<<"$cgroups"
  put "$SLURM_CONF" <<CONF
ClusterName=$name
SlurmctldHost=ctl($net.1)
SlurmctldPort=$ctld_port
SlurmdPort=$slurmd_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its old credential has expired: 10 s, not 2 min.
AuthInfo=socket=$socket,cred_expire=10
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=$track
TaskPlugin=$task
MpiDefault=none
FirstJobId=$((1000 * number))
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$net.1
AccountingStoragePort=$dbd_port
AccountingStoragePass=$socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
$([ $version -lt 2108 ] || echo AccountingStoreFlags=job_comment)
ReturnToService=2
KillWait=5
SlurmdTimeout=10
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-2] NodeAddr=$net.[11-12] CPUs=8 RealMemory=8000 Gres=gpu:a100:2 Feature=fast State=UNKNOWN
NodeName=n[3-4] NodeAddr=$net.[13-14] CPUs=8 RealMemory=8000 Gres=gpu:1g.10gb:2 Feature=slow State=UNKNOWN
PartitionName=debug Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=short Nodes=n[1-4] MaxTime=00:02:00 State=UP PriorityTier=10
PartitionName=scavenge Nodes=n[1-4] MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=spot Nodes=n[1-4] MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=10
CONF
  put "$dir/gres.conf" <<CONF
NodeName=n[1-2] Name=gpu Type=a100 File=$dir/dev/gpu[0-1]
NodeName=n[3-4] Name=gpu Type=1g.10gb File=$dir/dev/gpu[0-1]
CONF
  put "$dir/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$socket
DbdHost=localhost
DbdPort=$dbd_port
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$db_port
StorageUser=slurm
StoragePass=cluster
StorageLoc=slurm_acct_db
LogFile=$dir/log/slurmdbd.log
PidFile=$dir/run/slurmdbd.pid
CONF
  chmod 600 "$dir/slurmdbd.conf"
  put "$dir/hosts" <<<"127.0.0.1 localhost"$'\n'"$net.1 ctl $(hostname -s)"$'\n'"$(for i in 1 2 3 4; do echo "$net.1$i n$i"; done)"
  put "$dir/resolv.conf" <<<"nameserver 127.0.0.1"  # answers "no" at once: names outside /etc/hosts must not cost 10 s
  for i in 0 1; do [ -c "$dir/dev/gpu$i" ] || { mknod "$dir/dev/gpu$i" c 240 $i && chmod 666 "$dir/dev/gpu$i"; }; done
}
