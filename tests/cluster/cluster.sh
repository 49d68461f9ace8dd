#!/usr/bin/env bash
# A real Slurm cluster of four hosts on one Debian or Ubuntu machine, for tests. README.md beside this file tells how to use it.
set -Eeuo pipefail
trap 'echo "cluster.sh: line $LINENO failed: $BASH_COMMAND" >&2' ERR

usage() {
  cat <<TEXT
usage: cluster.sh up | down | status | cut NODE | mend NODE
  up      start the cluster, or mend what is missing of it; the last line printed says what to export
  down    end its jobs and daemons and remove every trace of it
  status  say what runs; exit 0 if all does, 3 if nothing does, 1 otherwise
  cut     take NODE (n1-n4) off the network, as a pulled cable would
  mend    bring NODE back and wait until it is idle
CLUSTER_DIR     where all of it lies; not below /tmp, each node has its own (default /opt/slurm-train-cluster)
CLUSTER_NUMBER  1 to 9: ports, addresses and names, so that clusters can stand side by side (default 1)
CLUSTER_LIMITS  "no" leaves out memory and device limits even where they work
exit codes: 0 done, 2 refused (nothing was touched), 1 a step failed
TEXT
}

refuse() { echo "cluster.sh: $1" >&2 && exit 2; }

# A step failed: what, and the end of the log that tells why.
fail() {
  echo "cluster.sh: $1" >&2
  [ ! -s "${2:-}" ] || { echo "--- the end of $2" && tail -n 20 "$2"; } >&2
  exit 1
}

script=$(realpath "$0")
repo=$(realpath "$(dirname "$script")/../..")
number=${CLUSTER_NUMBER:-1}
[[ $number =~ ^[1-9]$ ]] || refuse "CLUSTER_NUMBER=$number: give a number from 1 to 9"
name=slurm-train-$number  # of the cluster, and of its cgroups
dir=${CLUSTER_DIR:-/opt/slurm-train-cluster$([ "$number" = 1 ] || echo "-$number")}
[[ $dir =~ ^/[A-Za-z0-9._/-]+$ && $dir/ != /tmp/* && $dir != */ ]] ||
  refuse "CLUSTER_DIR=$dir: give an absolute path of plain letters that does not lie below /tmp"
marker=$dir/.slurm-train-cluster  # in every directory that is ours to remove
net=10.78.$number
bridge=stc$number
base=$((17000 + 10 * number))  # below the kernel's ephemeral ports
ctld_port=$((base + 1)) slurmd_port=$((base + 2)) dbd_port=$((base + 3)) db_port=$((base + 4))
nodes=(n1 n2 n3 n4)
socket=$dir/run/munge/socket
export SLURM_CONF=$dir/slurm.conf PATH=$PATH:/usr/sbin:/sbin
umask 022
cd /  # a daemon must not hold the caller's directory

# shellcheck source=tests/cluster/config.sh
. "$(dirname "$script")/config.sh"

# ---- which processes are ours

# The process ids of our daemons called COMM. Pid files are not asked: they go stale, and their number may be another's by now.
pids() {
  local pid
  for pid in $(pgrep -x "$1" || true); do
    if grep -qszxF "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ"; then echo "$pid"; fi
  done
}

node_pid() {
  local pid
  for pid in $(pids slurmd); do
    if grep -qszx "$1" "/proc/$pid/cmdline"; then echo "$pid" && return; fi
  done
}

# Whether NODE's slurmd runs in the namespace of that name and sees this very script: a clone below /tmp is shown to it on purpose.
node_runs() {
  local pid
  pid=$(node_pid "$1")
  [ -n "$pid" ] && [ "$(ip netns identify "$pid" 2>/dev/null)" = "$bridge-$1" ] && [ "/proc/$pid/root$script" -ef "$script" ]
}

# End a process and, if it lives in a network namespace other than this one, all that share it: a node with its jobs.
end_host_of() {
  local space all=$1
  space=$(readlink "/proc/$1/ns/net") || return 0
  [ "$space" = "$(readlink /proc/self/ns/net)" ] ||
    all=$({ find /proc/[0-9]*/ns/net -maxdepth 0 -lname "${space//[/\\[}" 2>/dev/null || true; } | cut -d/ -f3)
  # shellcheck disable=SC2086  # a list of numbers
  kill -KILL $all 2>/dev/null || true
}

# Ask COMMAND every 0.2 s until it succeeds, for SECONDS at most.
wait_for() {
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -le "$end" ] || return 1
    sleep 0.2
  done
}

daemon() { env -i PATH="$PATH" LANG=C.UTF-8 SLURM_CONF="$SLURM_CONF" "$@" </dev/null; }

first_of() {
  local word
  for word in "$@"; do if command -v "$word" >/dev/null; then echo "$word" && return; fi; done
}

# ---- may we?

check_root() { [ "$(id -u)" = 0 ] || refuse "needs root: sudo bash $script $1"; }

check_packages() {
  local pair missing=""
  for pair in munged:munge mariadbd:mariadb-server slurmdbd:slurmdbd slurmctld:slurmctld slurmd:slurmd sinfo:slurm-client \
    ip:iproute2 pgrep:procps nsenter:util-linux; do
    command -v "${pair%:*}" >/dev/null || missing+=" ${pair#*:}"
  done
  [ -z "$missing" ] || refuse "packages are missing: apt-get install -y --no-install-recommends$missing"
}

# A daemon with a configuration of its own outside /etc is some sandbox; any other is the machine's part in a real cluster.
check_machine() {
  local file pid config
  for file in /etc/slurm/slurm.conf /etc/slurm-llnl/slurm.conf; do
    [ ! -e "$file" ] || refuse "this machine belongs to a Slurm cluster ($file): use that one, or another machine"
  done
  for pid in $(pgrep -x slurmctld || true; pgrep -x slurmd || true); do  # pgrep takes 15 letters at most
    config=$(config_of "$pid")
    [[ $config == /* && $config != /etc/* ]] || [ -z "$(words_of "$pid")" ] ||
      refuse "this machine belongs to a Slurm cluster ($(cat "/proc/$pid/comm"), process $pid): use that one, or another machine"
  done
}

words_of() { { tr '\0' '\n' <"/proc/$1/cmdline"; } 2>/dev/null || true; }  # nothing of a process that has ended

# The configuration of a daemon: the word after -f, or SLURM_CONF, or nothing.
config_of() {
  local config
  config=$(words_of "$1" | sed -n '/^-f$/{n;p}')
  [ -n "$config" ] || config=$(grep -szm1 '^SLURM_CONF=' "/proc/$1/environ" | tr -d '\0') || true
  echo "${config#SLURM_CONF=}"
}

check_room() {
  local pair listeners pid other
  if [ -e "$dir" ] && [ ! -e "$marker" ] && [ -n "$(ls -A "$dir")" ]; then refuse "$dir exists and is not a cluster of this script"; fi
  [ ! -e "$marker" ] || [ "$(cat "$marker")" = "$number" ] || refuse "$dir belongs to CLUSTER_NUMBER=$(cat "$marker")"
  for pair in "slurmctld $ctld_port" "slurmdbd $dbd_port" "mariadbd $db_port"; do
    listeners=$(ss -Hltnp "sport = :${pair#* }")
    for pid in $(pids "${pair% *}"); do [[ $listeners != *"pid=$pid,"* ]] || continue 2; done
    [ -z "$listeners" ] || refuse "port ${pair#* } is taken by another program: try another CLUSTER_NUMBER"
  done
  other=$(ip -4 -o addr show to "$net.0/24" | awk '{print $2}' | grep -vx "$bridge" | head -n 1) || true
  [ -z "$other" ] || refuse "the addresses $net.0/24 are taken by the network device $other: try another CLUSTER_NUMBER"
}

# ---- the parts; each step leaves alone what is there already

munge_answers() { [ -n "$(pids munged)" ] && munge --socket="$socket" -n; }

start_munge() {  # a key and a socket of its own: the machine's munged stays as it is
  if munge_answers >/dev/null 2>&1; then return; fi
  [ -s "$dir/munge/key" ] || { head -c 1024 /dev/urandom >"$dir/munge/key.new" && mv "$dir/munge/key.new" "$dir/munge/key"; }
  chmod 600 "$dir/munge/key"
  chown -R munge "$dir/munge"
  install -d -o munge -m 755 "$dir/run/munge"
  daemon runuser -u munge -- munged --force --key-file="$dir/munge/key" --socket="$socket" --pid-file="$dir/run/munge/munged.pid" \
    --log-file="$dir/munge/munged.log" --seed-file="$dir/munge/seed" >"$dir/log/munged.out" 2>&1 || fail "munged does not start" "$dir/log/munged.out"
  wait_for 10 munge_answers || fail "munged does not answer" "$dir/munge/munged.log"
}

start_database() {
  local admin client install
  admin=$(first_of mariadb-admin mysqladmin) client=$(first_of mariadb mysql) install=$(first_of mariadb-install-db mysql_install_db)
  if [ -z "$(pids mariadbd)" ]; then
    if [ ! -d "$dir/db" ]; then
      rm -rf "$dir/db.new"  # half made, if an earlier start was killed
      "$install" --no-defaults --user=mysql --datadir="$dir/db.new" --skip-test-db --force >"$dir/log/db-install.log" 2>&1 ||
        fail "$install failed" "$dir/log/db-install.log"
      mv "$dir/db.new" "$dir/db"
    fi
    daemon setsid mariadbd --no-defaults --user=mysql --datadir="$dir/db" --socket="$dir/db/socket" --pid-file="$dir/db/pid" \
      --port="$db_port" --bind-address=127.0.0.1 --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
      --innodb-flush-log-at-trx-commit=2 --performance-schema=off >"$dir/log/db.log" 2>&1 &
  fi
  wait_for 60 "$admin" --no-defaults --socket="$dir/db/socket" ping || fail "mariadbd does not answer" "$dir/log/db.log"
  "$client" --no-defaults --socket="$dir/db/socket" -e "create database if not exists slurm_acct_db;
    create user if not exists slurm@127.0.0.1 identified by 'cluster'; grant all on slurm_acct_db.* to slurm@127.0.0.1;"
}

# Hardware addresses are fixed, so that what is made anew is found at once and not after the old one is forgotten.
start_network() {
  local node space i=0
  ip link show "$bridge" >/dev/null 2>&1 || ip link add "$bridge" address "02:00:00:00:0$number:01" type bridge
  ip addr replace "$net.1/24" dev "$bridge"
  ip link set "$bridge" up
  if [ "$(cat /proc/sys/net/bridge/bridge-nf-call-iptables 2>/dev/null)" = 1 ] && command -v iptables >/dev/null; then
    # Docker closes the forward chain, and bridges pass through it.
    iptables -w -C FORWARD -i "$bridge" -o "$bridge" -j ACCEPT 2>/dev/null || iptables -w -I FORWARD -i "$bridge" -o "$bridge" -j ACCEPT
  fi
  for node in "${nodes[@]}"; do
    i=$((i + 1)) space=$bridge-$node
    if ! ip -n "$space" link show lo >/dev/null 2>&1; then
      ip netns del "$space" 2>/dev/null || true
      rm -f "/run/netns/$space"
      ip netns add "$space"
    fi
    if ! ip -n "$space" link show eth0 >/dev/null 2>&1; then
      ip link del "$bridge-v$i" 2>/dev/null || true
      ip link add "$bridge-v$i" type veth peer name eth0 address "02:00:00:00:0$number:1$i" netns "$space"
    fi
    ip link set "$bridge-v$i" master "$bridge" up
    ip -n "$space" addr replace "$net.1$i/24" dev eth0
    ip -n "$space" link set lo up
    ip -n "$space" link set eth0 up
    ip -n "$space" route replace default via "$net.1"
  done
}

accounting_answers() { sacctmgr -n show cluster; }

start_accounting() {
  local user
  [ -n "$(pids slurmdbd)" ] || daemon slurmdbd >"$dir/log/slurmdbd.out" 2>&1 || fail "slurmdbd does not start" "$dir/log/slurmdbd.log"
  wait_for 60 accounting_answers || fail "slurmdbd does not answer" "$dir/log/slurmdbd.log"
  for user in root ${SUDO_USER:-}; do
    [ "$(sacctmgr -nP show assoc where user="$user" account=research cluster="$name" format=qos)" = "normal,small" ] || add_user "$user"
  done >"$dir/log/accounts.log" 2>&1
}

# The account "research" is everyone's default; the QOS "small" allows two nodes. sacctmgr exits 1 where a thing is there already.
add_user() {
  sacctmgr -i add cluster "$name" || true
  sacctmgr -i add account research Description=research Organization=tests || true
  sacctmgr -i add qos small MaxTRESPerJob=node=2 Flags=DenyOnLimit || true
  sacctmgr -i add user "$1" account=research || true
  sacctmgr -i modify user "$1" where account=research set qos=normal,small defaultqos=normal
  sacctmgr -i modify user "$1" set defaultaccount=research || true
}

start_controller() {  # with the nodes' /etc/hosts: it answers srun by this machine's name, which may resolve nowhere else
  # shellcheck disable=SC2016  # for the inner shell
  [ -n "$(pids slurmctld)" ] || daemon unshare --uts --mount --propagation slave bash -euc '
    hostname ctl
    mount --bind "$1/hosts" /etc/hosts
    exec slurmctld -i' _ "$dir" >"$dir/log/slurmctld.out" 2>&1 || fail "slurmctld does not start" "$dir/log/slurmctld.log"
  wait_for 20 scontrol ping || fail "slurmctld does not answer" "$dir/log/slurmctld.log"
}

start_node() {
  local node=$1 pid
  pid=$(node_pid "$node")
  [ -z "$pid" ] || { end_host_of "$pid" && wait_for 5 test ! -e "/proc/$pid"; } || true
  install -d -m 1777 "$dir/tmp/$node"
  # shellcheck disable=SC2016  # for the inner shell
  daemon nsenter --net="/run/netns/$bridge-$node" unshare --uts --mount --propagation slave bash -euc '
    node=$1 dir=$2 repo=$3
    hostname "$node"
    case $repo/ in /tmp/*) mkdir -p "$dir/tmp/$node${repo#/tmp}" && mount --bind "$repo" "$dir/tmp/$node${repo#/tmp}" ;; esac
    mount --rbind "$dir/tmp/$node" /tmp
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mount --bind "$dir/hosts" /etc/hosts
    [ ! -e /etc/resolv.conf ] || mount --bind "$dir/resolv.conf" /etc/resolv.conf
    exec slurmd -N "$node"' _ "$node" "$dir" "$repo" >"$dir/log/slurmd-$node.out" 2>&1 ||
    { cat "$dir/log/slurmd-$node.out" >&2 && fail "slurmd of $node does not start" "$dir/log/slurmd-$node.log"; }
}

state_of() { sinfo -h -p debug -n "$1" -o '%T, %E'; }

node_ready() { [[ $(sinfo -h -p debug -n "$1" -o %T) =~ ^(idle|mixed|allocated|completing|planned)$ ]]; }

# slurmctld takes a node back only after it was declared down and resumed.
resume_node() {
  scontrol update nodename="$1" state=down reason=cluster.sh && scontrol update nodename="$1" state=resume
}

# ---- the commands

up() {
  local node
  check_packages
  check_machine
  check_room
  mkdir -p "$dir"
  chmod 755 "$dir"
  echo "$number" >"$marker"
  mkdir -p "$dir"/{state,spool,log,run,dev,tmp,munge,cgroup}
  install -d -m 1777 "$dir/work"
  write_config
  start_munge
  start_network
  start_database
  start_accounting
  start_controller
  for node in "${nodes[@]}"; do node_runs "$node" || start_node "$node"; done
  for node in "${nodes[@]}"; do
    wait_for 5 node_ready "$node" || { resume_node "$node" && wait_for 30 node_ready "$node"; } ||
      fail "$node does not come up: $(state_of "$node")" "$dir/log/slurmd-$node.log"
  done
  sinfo
  echo "memory and device limits: $(cat "$dir/limits")"
  echo "export SLURM_CONF=$SLURM_CONF"
}

status() {
  local comm node running=0 missing=0 word
  tell() {
    if [ -n "$2" ]; then word="runs (process $2)" running=$((running + 1)); else word="does not run" missing=$((missing + 1)); fi
    echo "$1 $word"
  }
  for comm in munged mariadbd slurmdbd slurmctld; do tell "$comm" "$(pids "$comm" | head -n 1)"; done
  for node in "${nodes[@]}"; do tell "slurmd of $node" "$(if node_runs "$node"; then node_pid "$node"; fi)"; done
  [ "$running" -gt 0 ] || exit 3
  [ "$missing" = 0 ] || exit 1
  for node in "${nodes[@]}"; do
    node_ready "$node" || { echo "$node: $(state_of "$node")" && exit 1; }
  done
  echo "export SLURM_CONF=$SLURM_CONF"
}

queue_empty() { [ -z "$(timeout 3 squeue -h -o %A)" ]; }

down() {
  local node comm pid i
  if [ -e "$dir" ] && [ ! -e "$marker" ]; then refuse "$dir is not a cluster of this script: it stays"; fi
  [ ! -e "$marker" ] || [ "$(cat "$marker")" = "$number" ] || refuse "$dir belongs to CLUSTER_NUMBER=$(cat "$marker")"
  if [ -n "$(pids slurmctld)" ]; then  # so that waiting srun and sbatch --wait learn of it
    timeout 10 squeue -h -o %A | sort -u | timeout 10 xargs -r scancel || true
    wait_for 3 queue_empty || true
  fi
  for comm in slurmctld slurmscriptd slurmd slurmstepd slurmdbd mariadbd munged; do  # by force: nothing of theirs is kept
    for pid in $(pids "$comm"); do end_host_of "$pid"; done
  done
  for i in 1 2 3 4; do
    for pid in $(ip netns pids "$bridge-n$i" 2>/dev/null || true); do kill -KILL "$pid" 2>/dev/null || true; done
    ip link del "$bridge-v$i" 2>/dev/null || true
    ip netns del "$bridge-n$i" 2>/dev/null || rm -f "/run/netns/$bridge-n$i"
  done
  ip link del "$bridge" 2>/dev/null || true
  ! command -v iptables >/dev/null || iptables -w -D FORWARD -i "$bridge" -o "$bridge" -j ACCEPT 2>/dev/null || true
  if [ -d /run/netns ] && [ -z "$(ls -A /run/netns)" ]; then { umount /run/netns; rmdir /run/netns; } 2>/dev/null || true; fi
  remove_cgroups
  [ ! -e "$marker" ] || rm -rf --one-file-system "$dir"
}

# Move the switch's end of a node's cable: NODE up|down.
plug() {
  [[ $1 =~ ^n[1-4]$ ]] || refuse "give a node: n1, n2, n3 or n4"
  ip link set "$bridge-v${1#n}" "$2" 2>/dev/null || refuse "no cluster is up in $dir"
}

cut_node() { plug "${1:-}" down; }

node_idle() { [ "$(sinfo -h -p debug -n "$1" -o %T)" = idle ]; }

mend_node() {
  plug "${1:-}" up
  resume_node "$1"
  wait_for 60 node_idle "$1" || fail "$1 does not come back: $(state_of "$1")" "$dir/log/slurmd-$1.log"
}

command=${1:-}
case $command in
  up | down | status | cut | mend) check_root "$command" ;;
  -h | --help | help) usage && exit ;;
  *) usage >&2 && exit 2 ;;
esac
case $command in up | down)  # one at a time; the lock's file is this script, so that none is left lying about
  [ -n "${CLUSTER_LOCKED:-}" ] || CLUSTER_LOCKED=1 exec flock --close "$script" bash "$script" "$@" ;;
esac
shift
case $command in cut | mend) command+=_node ;; esac
"$command" "$@"
