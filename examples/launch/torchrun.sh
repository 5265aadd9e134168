#!/usr/bin/env bash
# Train on several nodes with torchrun. On every node, in the same folder:
#
#     HEAD=node0 NODES=2 bash examples/launch/torchrun.sh --checkpoint-dir /shared/run
#
# HEAD      name or address of the node that hosts the rendezvous; this node must not die
# NODES     number of nodes; with a range such as 2:4, nodes may leave and join during training
# RANKS     ranks of each node: a number, "gpu" or "cpu"; by default one for each GPU or core
# PORT      port of the rendezvous on HEAD (29500)
# JOB       name of this training, the same on all its nodes (train)
# RESTARTS  how often the ranks may be restarted (10)
# PATIENCE  seconds until a silent node leaves the rendezvous (15)
# ADDRESS   address of this node, if its name does not resolve to it
#
# Further arguments are options of train.py. If a rank dies, torchrun stops all ranks, waits until
# all nodes are there, and restarts the ranks from the newest checkpoint. To let a node join again,
# start it with the same command.
set -euo pipefail

: "${HEAD:?set HEAD to the name or address of the node that hosts the rendezvous}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
seconds=${PATIENCE:-15}
conf=join_timeout=1800,keep_alive_interval=$((seconds > 3 ? seconds / 3 : 1)),keep_alive_max_attempt=3
if [ "${ADDRESS:-}" = "$HEAD" ]; then
    conf+=,is_host=1 # otherwise torchrun compares HEAD with the address of this node's name
fi

# Otherwise, a node that joins later waits for an address that it never learns.
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
