#!/usr/bin/env bash
# A start script for MPI jobs of the kind that the platform's users copy: serial.sh PROGRAM [ARGS]...
#
# It does what the vendor's script does, but is not a copy: it is the same on every node; node 0
# resolves and probes one node after the other, each without a limit, then calls mpirun; the others
# sleep. Where the vendor's way only costs time, this script is faster: getent instead of ping, a
# working test of the port, and a tenth of a second between two attempts.
set -u

work=$HOME/serial
port=${SSHD_PORT:-38888}
index=${MA_TASK_INDEX:-${VC_TASK_INDEX:-${VK_TASK_INDEX:-0}}}
slots=${MA_NUM_GPUS:-0}
((slots)) || slots=1
# With the file of an earlier run mpirun fails, as each host would be listed twice.
rm -rf "$work"
mkdir -p "$work"

env | grep -E '^MA_|^SHARED_|^S3_|^PATH|^VC_WORKER_|^SCC|^CRED' | grep -v '=$' >"$work/tune"
sed -i 's/^/-x /' "$work/tune"
sed -e "s#{{port}}#$port#" -e "s#{{home}}#$HOME#" -e "s#{{work}}#$work#" >"$work/sshd_config" <<'END'
Port {{port}}
HostKey {{home}}/.ssh/id_ed25519
AuthorizedKeysFile {{home}}/.ssh/authorized_keys
PidFile {{work}}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
END
PATH=$PATH:/usr/sbin
"$(command -v sshd)" -f "$work/sshd_config"

if ((index)); then
    exec sleep 365d
fi

for ((i = 0; i < MA_NUM_HOSTS; i++)); do
    host=$MA_VJ_NAME-$MA_TASK_NAME-$i.$MA_VJ_NAME
    until read -r ip _ < <(getent ahostsv4 "$host"); do
        sleep 0.1
    done
    until (: <"/dev/tcp/$ip/$port") 2>/dev/null; do
        sleep 0.1
    done
    echo "$ip slots=$slots" >>"$work/hostfile"
done

ssh_args=(-mca plm_rsh_args "-p $port" -mca plm_rsh_no_tree_spawn true)
mpirun -np $((MA_NUM_HOSTS * slots)) -hostfile "$work/hostfile" "${ssh_args[@]}" \
    -tune "$work/tune" -bind-to none -map-by slot -x NCCL_DEBUG=INFO \
    -mca btl_tcp_if_include eth0 -mca pml ob1 -mca btl ^openib "$@"
code=$?
if ((MA_NUM_HOSTS > 1)); then
    sed 1d "$work/hostfile" >"$work/others"
    mpirun -np $(((MA_NUM_HOSTS - 1) * slots)) -hostfile "$work/others" "${ssh_args[@]}" \
        pkill sleep
fi
exit "$code"
