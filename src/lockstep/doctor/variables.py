"""Variables of the environment that change how ranks talk and compute: what each does, and whether it hurts here."""

import os
from collections.abc import Iterator, Mapping

from lockstep.doctor.finding import Finding, noted

MEANINGS = {
    "OMP_NUM_THREADS": "threads of each rank on a CPU",
    "MKL_NUM_THREADS": "the same, for MKL",
    "CUDA_VISIBLE_DEVICES": "which GPUs torch sees",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NCCL_DEBUG": "what NCCL prints",
    "NCCL_DEBUG_SUBSYS": "about what",
    "NCCL_SOCKET_IFNAME": "the interfaces that NCCL's sockets use",
    "NCCL_IB_DISABLE": "1: no InfiniBand, sockets instead",
    "NCCL_IB_HCA": "the InfiniBand cards that NCCL uses",
    "NCCL_P2P_DISABLE": "1: no NVLink or PCIe between GPUs of a node",
    "NCCL_SHM_DISABLE": "1: no shared memory between ranks of a node",
    "NCCL_NET": "the network that NCCL uses",
    "NCCL_ALGO": "which algorithms NCCL may choose",
    "NCCL_PROTO": "which protocols NCCL may choose",
    "NCCL_HOSTID": "which host NCCL believes to be on (several ranks on one GPU)",
    "NCCL_TIMEOUT": "not a variable of NCCL or torch: it does nothing",
    "NCCL_BLOCKING_WAIT": "an old name, which torch ignores",
    "TORCH_NCCL_BLOCKING_WAIT": "waiting for NCCL blocks the host",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what happens when NCCL times out",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "how many collectives the flight recorder remembers",
    "TORCH_FR_BUFFER_SIZE": "the same, by its newer name",
    "TORCH_CPP_LOG_LEVEL": "what torch's C++ prints",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1: torchrun sends a node that joins later the address of the rendezvous",
    "TORCH_DISTRIBUTED_DEBUG": "checks of torch.distributed",
    "GLOO_SOCKET_IFNAME": "the interface that gloo uses",
    "TP_SOCKET_IFNAME": "the interface that torch's RPC uses",
    "MASTER_ADDR": "the address of the rendezvous",
    "MASTER_PORT": "and at which port",
    "WORLD_SIZE": "how many ranks there are",
    "RANK": "which one this process is",
    "LOCAL_RANK": "which one on this machine",
    "PYTORCH_CUDA_ALLOC_CONF": "how torch allocates the GPU's memory",
    "PYTORCH_ALLOC_CONF": "how torch allocates memory",
}
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NODELIST")


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    names = [n for n in sorted(environment) if n in MEANINGS or n.startswith(PREFIXES)]
    if not names:
        yield Finding("environment", "no variable of torch.distributed, NCCL or OMP is set")
    for name in names:
        value = environment[name]
        what = f"{name}={value}: {MEANINGS.get(name, 'of ' + name.split('_')[0])}"
        yield noted("environment", what, harm(name, value, environment))


def harm(name: str, value: str, environment: Mapping[str, str]) -> str:
    """Why it should not be set so; empty where it may."""
    if name == "CUDA_LAUNCH_BLOCKING" and value == "1":
        return "nothing overlaps: unset it unless you look for an error"
    if name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") and value == "1" and "NCCL_HOSTID" not in environment:
        return "GPUs of a node talk through the network: unset it unless ranks share a GPU"
    if name == "NCCL_IB_DISABLE" and value == "1":
        return "right where there is no InfiniBand; with it, unset it"
    if name in ("NCCL_ALGO", "NCCL_PROTO"):
        return "NCCL chooses by size and topology: fixed, some sizes are slower"
    if name in ("NCCL_TIMEOUT", "NCCL_BLOCKING_WAIT"):
        return "unset it; --timeout says how long ranks wait"
    if name == "TORCH_DISTRIBUTED_DEBUG" and value.upper() == "DETAIL":
        return "every collective is checked with another one: slow"
    if name.endswith("SOCKET_IFNAME") and value in ("lo", "lo0"):
        return "only ranks of this machine reach each other"
    if name == "RANK" and "WORLD_SIZE" not in environment:
        return "RANK without WORLD_SIZE: commands think that they are no rank of a job; unset it"
    return ""
