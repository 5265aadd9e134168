#!/usr/bin/env bash
# Train on several nodes with torchrun. On every node, in the same folder:
#
#     HEAD=node0 NODES=2 bash examples/launch/torchrun.sh --checkpoint-dir /shared/run
#
# HEAD      the node that hosts the rendezvous, by name or address; it must outlive the others
# NODES     how many: a number, or a range such as 2:4 to go on with fewer and to let more join
# RANKS     of each node: a number, "gpu" or "cpu"; if absent, one for each GPU, or for each core
# PORT      of the rendezvous on HEAD (29500)
# JOB       a name that nodes of one training share (train)
# RESTARTS  how often the ranks may be started again (10)
# PATIENCE  seconds until a node that says nothing is given up (15)
# ADDRESS   of this node, where its name does not lead to it
#
# What follows are options of train.py. A rank that dies takes down its job; the others wait for the
# nodes to be complete, and all go on from the newest checkpoint. So start a node again with the
# same command, and it joins.
set -euo pipefail

: "${HEAD:?set HEAD to the name or address of the node that hosts the rendezvous}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
seconds=${PATIENCE:-15}
conf=join_timeout=1800,keep_alive_interval=$((seconds > 3 ? seconds / 3 : 1)),keep_alive_max_attempt=3
if [ "${ADDRESS:-}" = "$HEAD" ]; then
    conf+=,is_host=1 # torchrun would compare HEAD to what the name of this node leads to
fi

# Otherwise, a node that joins anew waits for an address that was told in an earlier round alone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${NODES:-2}" \
    --nproc-per-node "${RANKS:-auto}" \
    --max-restarts "${RESTARTS:-10}" \
    --monitor-interval 1 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:${PORT:-29500}" \
    --rdzv-id "${JOB:-train}" \
    --rdzv-conf "$conf" \
    ${ADDRESS:+--local-addr "$ADDRESS"} \
    "$here/train.py" "$@"
