"""The cause taxonomy: what each `cause` slug means, and which other causes it explains.

A slug names the fault, not the observation, and is public: it keeps its meaning for ever (`pdtrain.report/1`).
`verdict` is what a report says when a finding of this cause leads it; "context" causes never lead.
`EXPLAINS` is the graph that the correlator walks: a link says which cause is accounted for and what both findings
must share. Unknown never equals unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shared = Literal["rank", "host", "group", "job"]


@dataclass(frozen=True, slots=True)
class Cause:
    """One row of the taxonomy."""

    slug: str
    meaning: str
    verdict: Literal["failed", "degraded", "healthy", "unknown", "context"]


@dataclass(frozen=True, slots=True)
class Link:
    """`cause` is explained when both findings share `same` and the explaining one is not later."""

    cause: str
    same: Shared = "job"


_ROWS = (
    Cause("collective_mismatch",
          "ranks are in different collectives / sizes / sequence numbers (code path diverged); timeouts are the "
          "effect",
          "failed"),
    Cause("uneven_batches",
          "ranks got different numbers of batches, so one enters a collective the others never call",
          "failed"),
    Cause("peer_exception",
          "one rank died of a Python/CUDA exception or missing file; the others only wait, spin or complain",
          "failed"),
    Cause("slow_rank_work",
          "one rank (usually 0) is legitimately busy (tokenising, reading, saving, preparing) longer than the "
          "others' timeout",
          "failed"),
    Cause("hang_silent", "nothing fails and no timeout fires; progress lines simply stop", "failed"),
    Cause("jit_build_lock", "all ranks wait for a stale build lock of a JIT-compiled extension", "failed"),
    Cause("store_lost",
          "the process that hosts the TCPStore/rendezvous is gone; survivors only see broken pipes",
          "failed"),
    Cause("missing_rank_init", "one or more ranks never started or never reached initialisation", "failed"),
    Cause("rendezvous_timeout", "the rendezvous/master endpoint cannot be reached", "failed"),
    Cause("hostname_resolution", "a host name needed for start-up does not resolve", "failed"),
    Cause("port_in_use", "the master/rendezvous port is already bound", "failed"),
    Cause("preempted", "the scheduler stopped the job (preemption, requeue); no fault in the program", "failed"),
    Cause("wrong_nic", "NCCL/Gloo picked an unusable network interface", "failed"),
    Cause("ib_link_error",
          "InfiniBand/RoCE link trouble (port error, retry exceeded: error/status 12, vendor err 129)",
          "failed"),
    Cause("ib_gdr_acs",
          "GPUDirect-RDMA broken by PCIe ACS/IOMMU (local protection error 4, vendor err 81)",
          "failed"),
    Cause("ib_hca_failure", "the network adapter itself failed", "failed"),
    Cause("p2p_acs_iommu",
          "GPU peer-to-peer over PCIe hangs (ACS/IOMMU): first collective never completes after a clean init",
          "failed"),
    Cause("nccl_net_plugin", "an NCCL network plugin in the image does not fit the host", "failed"),
    Cause("nccl_version_mismatch", "two NCCL libraries / wrong NCCL version is loaded", "failed"),
    Cause("shm_too_small", "/dev/shm is too small (posix_fallocate ENOSPC, SIGBUS / exit -7)", "failed"),
    Cause("duplicate_gpu", "several ranks use the same GPU (launcher/placement mistake)", "failed"),
    Cause("no_kernel_image", "binary was not built for this GPU architecture", "failed"),
    Cause("fabric_manager", "NVSwitch fabric manager not running or wrong version (CUDA 802)", "failed"),
    Cause("driver_mismatch", "NVIDIA driver and user-space library versions differ", "failed"),
    Cause("gpu_ecc", "uncorrectable ECC error on a GPU", "failed"),
    Cause("gpu_fell_off_bus", "GPU lost from PCIe (Xid 79, 'Unable to determine the device handle')", "failed"),
    Cause("gpu_hw_fault", "GPU/host crashed without a more precise signature (CUDA unknown error)", "failed"),
    Cause("nvlink_error", "NVLink/NVSwitch link fault (Xid 74/145/149 ...)", "failed"),
    Cause("cuda_kernel_fault", "a kernel faulted (misaligned/illegal access) by a code bug", "failed"),
    Cause("device_assert_vocab",
          "device-side assert: index out of range (token id >= embedding rows, label out of range)",
          "failed"),
    Cause("cuda_oom", "GPU out of memory (activations, NCCL buffers, plain lack of memory)", "failed"),
    Cause("cuda_oom_fragmentation", "GPU OOM although reserved-but-unallocated memory would suffice", "failed"),
    Cause("cuda_oom_optimizer", "GPU OOM when optimizer states are created (first step)", "failed"),
    Cause("cuda_oom_shared_gpu", "GPU OOM because another process holds memory on the same GPU", "failed"),
    Cause("memory_leak", "GPU memory stays behind after every step, until it is full", "degraded"),
    Cause("memory_fragmentation", "much of the reserved GPU memory lies free between live blocks", "degraded"),
    Cause("memory_pressure", "the peak is above the watermark of the device (90 %)", "degraded"),
    Cause("memory_rank_differs", "one rank, or few, needs more GPU memory than its peers", "degraded"),
    Cause("host_oom",
          "host or container memory exhausted, confirmed by a kernel, cgroup, Slurm or Ray line, a MemoryError "
          "or 'cannot allocate memory'",
          "failed"),
    Cause("dataloader_worker_killed", "a DataLoader worker was killed (host memory)", "failed"),
    Cause("fork_segfault", "forked DataLoader workers segfault after RDMA/CUDA initialisation", "failed"),
    Cause("fork_cuda", "CUDA used in a forked subprocess", "failed"),
    Cause("ckpt_shape_mismatch",
          "checkpoint tensor shape differs from the model (vocabulary padding, changed config)",
          "failed"),
    Cause("ckpt_parallel_mismatch", "checkpoint saved with another tensor/model-parallel degree", "failed"),
    Cause("ckpt_missing_keys",
          "keys the model wants are not in the checkpoint (version or structure changed)",
          "failed"),
    Cause("ckpt_missing_shard", "a shard file is not on this node / was never copied", "failed"),
    Cause("ckpt_corrupt", "checkpoint file is truncated or not a checkpoint (LFS pointer)", "failed"),
    Cause("ckpt_world_size", "checkpoint saved with another (data-parallel) world size", "failed"),
    Cause("ckpt_universal", "universal-checkpoint conversion/loading lacks its metadata", "failed"),
    Cause("ckpt_config_mismatch", "hyper-parameters in the checkpoint differ from the launch arguments", "failed"),
    Cause("code_error", "plain software bug surfaced (e.g. at the first save)", "failed"),
    Cause("disk_full", "no space/quota while writing", "failed"),
    Cause("stale_file_handle", "network file system handle went stale (ESTALE)", "failed"),
    Cause("compile_cache_race", "race or NFS problem in the torch.compile/Triton cache", "failed"),
    Cause("too_many_open_files", "file-descriptor limit reached", "failed"),
    Cause("ds_batch_config", "DeepSpeed batch-size assertion (often a wrong world size)", "failed"),
    Cause("empty_dataset", "dataset is empty", "failed"),
    Cause("loss_nan",
          "loss/gradients became NaN or inf (also: 'lm loss' field missing, loss printed as 0.0)",
          "degraded"),
    Cause("loss_spike", "sudden loss/grad-norm spike, training (may) recover", "degraded"),
    Cause("loss_divergence", "loss rises and stays up", "degraded"),
    Cause("loss_degenerate", "loss collapses to ~0 at once (degenerate data/labels)", "degraded"),
    Cause("fp16_loss_scale_collapse",
          "dynamic loss scale falls to its minimum / steps are skipped for ever",
          "degraded"),
    Cause("learning_rate_zero",
          "the learning rate is 0 for good: steps are skipped, or the schedule is wrong or over",
          "degraded"),
    Cause("moe_router_collapse", "router sends (almost) all tokens to one expert per layer", "degraded"),
    Cause("slow_node", "throughput step-down caused by one slow GPU/node", "degraded"),
    Cause("slow_data_io", "throughput limited by data reading", "degraded"),
    Cause("teardown_hang", "failure only after the work was finished and saved (process exit)", "degraded"),
    Cause("healthy", "nothing to report", "healthy"),
    Cause("collective_missing_rank",
          "one or more ranks never issued the collective the rest of their group waits in",
          "failed"),
    Cause("rank_dump_missing", "a rank left no dump and the others wait for it", "failed"),
    Cause("p2p_unmatched", "a send without its receive, or the reverse", "failed"),
    Cause("group_order_deadlock",
          "ranks entered two process groups in different orders and wait on each other",
          "failed"),
    Cause("hang_all_waiting",
          "every member issued the same operation and none completes: network, GPU or library",
          "failed"),
    Cause("hang_undetermined", "the evidence does not single anyone out", "unknown"),
    Cause("exception_unknown",
          "a Python exception that no more specific cause covers is the first failure",
          "failed"),
    Cause("moe_expert_imbalance",
          "some experts or the ranks that carry them are persistently overloaded, routing has not collapsed",
          "degraded"),
    Cause("moe_token_drop", "tokens are dropped above the threshold at the configured capacity", "degraded"),
    Cause("loss_resume_jump", "the loss is discontinuous across a restart", "degraded"),
    Cause("grad_explosion",
          "gradient norm of a module or of the model grows without bound before the loss does",
          "degraded"),
    Cause("grad_module_imbalance",
          "the gradient norm of one module is ten times that of all others, so a common limit serves none",
          "degraded"),
    Cause("data_repeated",
          "the batches repeat what the run has read shortly before, within the first epoch",
          "degraded"),
    Cause("moe_identical_experts",
          "the experts of a layer are, or began as, copies of each other (one seed for all; upcycling)",
          "degraded"),
    Cause("throughput_decay", "steps get slower and slower, without a moment at which it began", "degraded"),
    Cause("periodic_stall", "one step in so many is much slower: what it costs and what it coincides with", "degraded"),
    Cause("all_to_all_slow", "the exchange of tokens between experts takes more than 30 % of the forward time",
          "degraded"),
    Cause("low_utilisation", "utilisation is low or one module is the bottleneck: where the time of a step goes",
          "context"),
    Cause("loss_plateau", "a model trained from scratch whose loss does not fall at all", "degraded"),
    Cause("loss_oscillation", "the loss swings with a fixed period: ordered data, or too high a learning rate",
          "degraded"),
    Cause("env_variable",
          "a variable of NCCL, torch or Gloo is misspelt, contradictory, a leftover of debugging or wrong advice",
          "degraded"),
    Cause("hosts_differ", "hosts of one job, or GPUs of one host, that should be alike are not", "degraded"),
    Cause("clock_skew", "the clocks of the hosts differ by more than their logs can be ordered with", "degraded"),
    Cause("gpu_throttled", "heat, power or a power brake holds the clocks of a GPU down", "degraded"),
    Cause("pcie_degraded", "the PCIe link of a GPU has fewer lanes or a lower generation than it could", "degraded"),
    Cause("host_limits", "a limit of the host or the container is too low: processes, locked memory, processors",
          "degraded"),
    Cause("memory_limit_low", "the container's memory limit leaves too little for its ranks", "degraded"),
    Cause("slow_storage", "writing a checkpoint is slow: rate or fsync of its file system", "degraded"),
    Cause("storage_unusable", "the checkpoint path does not exist, is read-only or not writable", "failed"),
    Cause("library_mismatch", "Python packages that torch pins or needs are there in another version", "degraded"),
    Cause("bandwidth_low", "a measured bandwidth is below what this hardware shows when it is sound", "degraded"),
    Cause("collective_wrong_result", "a collective returned wrong numbers: memory, link or driver corrupts data",
          "failed"),
    Cause("host_checked", "what was looked at of a host, and what it is", "context"),
    Cause("peer_unreachable", "a rank died, stopped or could not be reached while links were measured", "failed"),
    Cause("link_slow", "a host, one direction of it, or one link is slower than its peers or than its baseline",
          "degraded"),
    Cause("link_intermittent", "a host or link is slow at times, far more often than chance would have it", "degraded"),
    Cause("link_measured", "what a probe measured between the ranks of a job", "context"),
    Cause("straggler", "one rank is persistently slower than its peers (which phase, since when)", "degraded"),
    Cause("pool_member_lost", "a rank of one pool died or stopped answering, and the other pool lost it", "failed"),
    Cause("pool_restarted", "a rank of a pool died, all ranks were started again, and the run went on", "degraded"),
    Cause("pool_imbalance", "one pool is idle while the other works: the ratio of their ranks does not fit the work",
          "degraded"),
    Cause("pool_weights_late", "the compute pool waits for weights because the update pool, or one rank of it, is slow",
          "degraded"),
    Cause("pool_gradients_late", "the update pool waits for gradients because a rank of the compute pool is slow",
          "degraded"),
    Cause("pool_communication", "the exchange between the pools takes more than 15 % of a step", "degraded"),
    Cause("pool_queue_growth", "messages between the pools pile up: one side sends faster than the other takes",
          "degraded"),
    Cause("pool_payload_corrupt", "messages between the pools arrived damaged (checksum)", "degraded"),
    Cause("pool_version_mismatch", "gradients or weights of another weight version or incarnation crossed the pools",
          "degraded"),
    Cause("pool_delivery", "messages between the pools came late, twice or in another order, and were sorted out",
          "degraded"),
    Cause("pool_staleness", "gradients of weights older than the run allows", "degraded"),
    Cause("pool_measured", "both pools of a separated run side by side, and whether separation pays", "context"),
    Cause("ckpt_incomplete", "a save was interrupted: commit mark, tracker or shards missing", "degraded"),
    Cause("ckpt_bad_values",
          "a checkpoint's files are whole and its content is not: NaN, zeroed moments, equal experts, mixed steps",
          "failed"),
    Cause("ckpt_hostile",
          "a file of a checkpoint asks for code to be run, or for a path outside of the checkpoint",
          "failed"),
    Cause("ckpt_stale_shards", "shards of an older, larger save lie among those of a checkpoint", "degraded"),
    Cause("ckpt_differs", "two checkpoints that were compared do not hold the same weights", "context"),
    Cause("ckpt_checked", "what was checked of a checkpoint, and with which outcome", "context"),
    Cause("scheduler_time_limit", "the scheduler ended the job at its time limit", "failed"),
    Cause("node_failure", "the scheduler or the cloud declared the node dead", "failed"),
    Cause("segfault", "native crash (SIGSEGV/SIGABRT) without a more precise signature", "failed"),
    Cause("killed_unconfirmed", "SIGKILL / exit -9 with no line that says who killed it", "failed"),
    # Not failures of the run: what a report must be able to say about itself.
    Cause("input_unreadable",
          "an input is damaged, or in no format that is known here, and could not be (wholly) read",
          "context"),
    Cause("unexplained_end",
          "nothing known explains the end of the run; the most suspicious lines are shown",
          "unknown"),
)

CAUSES: dict[str, Cause] = {row.slug: row for row in _ROWS}

#: What is seen while others wait, or before anybody knows why: explained by nearly every real fault, never the reverse.
WAITING = frozenset({
    "collective_mismatch", "uneven_batches", "slow_rank_work", "hang_silent", "store_lost", "rendezvous_timeout",
    "missing_rank_init", "collective_missing_rank", "rank_dump_missing", "p2p_unmatched", "group_order_deadlock",
    "hang_all_waiting", "hang_undetermined", "scheduler_time_limit", "unexplained_end", "p2p_acs_iommu",
    "jit_build_lock", "teardown_hang",
})
#: What consoles and dumps each call the same wait in a collective.
VIEWS = frozenset({
    "collective_mismatch", "collective_missing_rank", "uneven_batches", "hang_silent", "rank_dump_missing",
    "p2p_unmatched", "group_order_deadlock", "hang_all_waiting", "hang_undetermined",
})
#: Real, but often the consequence of something more specific that the same rank, host or job shows.
GENERAL = frozenset({
    "exception_unknown", "peer_exception", "code_error", "killed_unconfirmed", "segfault", "cuda_kernel_fault",
    "gpu_hw_fault", "dataloader_worker_killed", "loss_spike", "loss_divergence", "slow_node", "slow_data_io",
    "straggler", "throughput_decay", "periodic_stall", "all_to_all_slow", "moe_token_drop", "moe_expert_imbalance",
    "ckpt_incomplete", "preempted", "pool_member_lost", "pool_imbalance", "pool_weights_late", "pool_gradients_late",
    "pool_communication", "pool_queue_growth", "pool_staleness", "pool_restarted", "pool_delivery",
})


#: Confirmed by somebody who prints late: a daemon at the end of a step, the kernel's log pasted below, the device.
LATE = frozenset({"host_oom", "gpu_ecc", "gpu_fell_off_bus", "nvlink_error", "node_failure", "ib_hca_failure",
                  "shm_too_small", "device_assert_vocab", "fabric_manager", "too_many_open_files"})
#: Says that something died and not why: the order of lines does not acquit a cause in `LATE`.
VAGUE = frozenset({"killed_unconfirmed", "segfault", "cuda_kernel_fault", "gpu_hw_fault", "dataloader_worker_killed",
                   "driver_mismatch"})
#: A framework's own investigation, printed after what it investigated: it explains numbers that went wrong above it.
VERDICTS = frozenset({"rerun-blames-gpu"})
#: Signatures that are as vague whatever cause they stand for: a finding that has no other.
VAGUE_SIGNATURES = frozenset({"cuda-launch-failure", "shm-object-open"})


def tier(cause: str) -> int:
    """3 for a specific fault, 2 for a general one, 1 for waiting: what to believe when the order is not known."""
    return 1 if cause in WAITING else 2 if cause in GENERAL else 3


def _links(*causes: str, same: Shared = "job") -> tuple[Link, ...]:
    return tuple(Link(cause, same) for cause in causes)


#: Links between real faults. That every one of them explains WAITING is added below.
_SPECIFIC: dict[str, tuple[Link, ...]] = {
    "moe_router_collapse": _links("moe_expert_imbalance", "moe_token_drop", "loss_spike", "loss_divergence",
                                  "all_to_all_slow"),
    "moe_expert_imbalance": _links("moe_token_drop", "cuda_oom", "straggler", "all_to_all_slow", "memory_rank_differs",
                                   "memory_pressure"),
    "memory_leak": _links("cuda_oom", "cuda_oom_fragmentation", "memory_pressure", "memory_rank_differs",
                          "memory_fragmentation"),
    "memory_fragmentation": _links("memory_pressure"),
    "cuda_oom": _links("memory_rank_differs", "memory_pressure"),
    "cuda_oom_fragmentation": _links("cuda_oom", "memory_fragmentation", "memory_rank_differs", "memory_pressure"),
    "moe_identical_experts": _links("moe_expert_imbalance"),
    "data_repeated": _links("moe_router_collapse", "moe_expert_imbalance", "loss_spike", "loss_resume_jump"),
    "straggler": _links("slow_node", "throughput_decay", "all_to_all_slow", "pool_gradients_late", "pool_imbalance"),
    "slow_node": _links("all_to_all_slow"),
    "slow_data_io": _links("straggler", "slow_node", "throughput_decay", "periodic_stall"),
    "pool_member_lost": _links("exception_unknown", "peer_exception", "code_error", "pool_queue_growth",
                               "pool_weights_late", "pool_gradients_late", "pool_imbalance", "pool_communication"),
    "pool_weights_late": _links("pool_imbalance", "pool_queue_growth", "pool_staleness", "throughput_decay",
                                "slow_node"),
    "pool_gradients_late": _links("pool_imbalance", "throughput_decay", "slow_node"),
    "pool_communication": _links("pool_imbalance", "pool_queue_growth", "pool_staleness", "throughput_decay",
                                 "slow_node"),
    "pool_payload_corrupt": _links("pool_communication", "pool_queue_growth", "exception_unknown", "peer_exception",
                                   "pool_member_lost", "code_error"),
    "pool_version_mismatch": _links("pool_staleness", "exception_unknown", "peer_exception", "pool_member_lost",
                                    "code_error", "loss_spike", "loss_divergence"),
    "pool_staleness": _links("loss_spike", "loss_divergence"),
    "grad_module_imbalance": _links("grad_explosion"),
    "loss_nan": _links("cuda_kernel_fault", "device_assert_vocab", "fp16_loss_scale_collapse", "exception_unknown",
                       "peer_exception", "code_error", "gpu_hw_fault"),
    "grad_explosion": _links("loss_nan", "loss_spike", "loss_divergence", "fp16_loss_scale_collapse"),
    "loss_resume_jump": _links("loss_nan", "loss_spike", "loss_divergence"),
    "loss_divergence": _links("loss_nan", "fp16_loss_scale_collapse"),
    "fp16_loss_scale_collapse": _links("learning_rate_zero", "loss_nan", "loss_spike", "loss_divergence",
                                       "exception_unknown"),
    "gpu_ecc": _links("gpu_hw_fault", "cuda_kernel_fault", "cuda_oom", "cuda_oom_shared_gpu", "gpu_fell_off_bus",
                      "exception_unknown", "peer_exception", "segfault", "killed_unconfirmed"),
    "gpu_fell_off_bus": _links("gpu_hw_fault", "cuda_kernel_fault", "nvlink_error", "gpu_ecc", "driver_mismatch",
                               "exception_unknown", "peer_exception", "segfault", "slow_node",
                               "killed_unconfirmed"),
    "nvlink_error": _links("gpu_hw_fault", "cuda_kernel_fault", "exception_unknown", "peer_exception", "segfault"),
    "gpu_hw_fault": _links("loss_nan", "cuda_kernel_fault", "exception_unknown", "peer_exception", "segfault",
                           "code_error"),
    "cuda_kernel_fault": _links("exception_unknown", "peer_exception", "segfault", "gpu_hw_fault"),
    "device_assert_vocab": _links("cuda_kernel_fault", "exception_unknown", "peer_exception", "cuda_oom", "segfault",
                                  "gpu_hw_fault"),
    "fabric_manager": _links("driver_mismatch", "gpu_hw_fault", "exception_unknown", "code_error", "nvlink_error",
                             "duplicate_gpu"),
    "driver_mismatch": _links("exception_unknown", "code_error", "gpu_hw_fault", "no_kernel_image"),
    "no_kernel_image": _links("exception_unknown", "code_error", "cuda_kernel_fault"),
    "fork_cuda": _links("dataloader_worker_killed", "exception_unknown", "code_error"),
    "fork_segfault": _links("dataloader_worker_killed", "segfault", "exception_unknown", "peer_exception"),
    "shm_too_small": _links("dataloader_worker_killed", "disk_full", "exception_unknown", "segfault", "code_error"),
    "host_oom": _links("dataloader_worker_killed", "killed_unconfirmed", "exception_unknown", "peer_exception",
                       "segfault", "node_failure"),
    "dataloader_worker_killed": _links("exception_unknown", "peer_exception", "killed_unconfirmed"),
    "disk_full": _links("ckpt_incomplete", "ckpt_corrupt", "exception_unknown", "peer_exception", "code_error",
                        "killed_unconfirmed", "segfault", "compile_cache_race"),
    "stale_file_handle": _links("ckpt_corrupt", "ckpt_missing_shard", "exception_unknown", "peer_exception",
                                "compile_cache_race", "disk_full"),
    "compile_cache_race": _links("exception_unknown", "peer_exception", "code_error", "stale_file_handle"),
    "too_many_open_files": _links("shm_too_small", "exception_unknown", "peer_exception", "dataloader_worker_killed",
                                  "code_error"),
    "ib_hca_failure": _links("ib_link_error", "ib_gdr_acs", "wrong_nic", "exception_unknown"),
    "ib_link_error": _links("wrong_nic", "exception_unknown"),
    "ib_gdr_acs": _links("ib_link_error", "exception_unknown"),
    "nccl_net_plugin": _links("wrong_nic", "exception_unknown", "segfault", "code_error"),
    "nccl_version_mismatch": _links("exception_unknown", "code_error", "nccl_net_plugin"),
    "duplicate_gpu": _links("exception_unknown", "code_error"),
    "wrong_nic": _links("exception_unknown"),
    "hostname_resolution": _links("wrong_nic", "exception_unknown", "code_error"),
    "port_in_use": _links("exception_unknown", "code_error", "wrong_nic"),
    "preempted": _links("killed_unconfirmed", "exception_unknown", "peer_exception", "segfault", "code_error",
                        "port_in_use"),
    "node_failure": _links("gpu_hw_fault", "cuda_kernel_fault", "killed_unconfirmed", "exception_unknown",
                           "peer_exception", "preempted", "ib_link_error"),
    "ckpt_parallel_mismatch": _links("ckpt_shape_mismatch", "ckpt_missing_keys", "ckpt_missing_shard",
                                     "exception_unknown", "ckpt_config_mismatch"),
    "ckpt_world_size": _links("ckpt_missing_shard", "ckpt_shape_mismatch", "exception_unknown"),
    "ckpt_universal": _links("ckpt_missing_keys", "ckpt_missing_shard", "exception_unknown", "code_error"),
    "ckpt_shape_mismatch": _links("ckpt_missing_keys", "exception_unknown", "code_error"),
    "ckpt_missing_shard": _links("exception_unknown", "peer_exception", "ckpt_corrupt"),
    "ckpt_missing_keys": _links("exception_unknown", "code_error"),
    "ckpt_corrupt": _links("exception_unknown", "peer_exception", "code_error", "ckpt_missing_keys"),
    "empty_dataset": _links("exception_unknown", "code_error"),
    "ds_batch_config": _links("exception_unknown", "code_error"),
    "jit_build_lock": _links("hang_silent", "exception_unknown", "scheduler_time_limit"),
    "slow_rank_work": _links("collective_mismatch", "missing_rank_init", "rendezvous_timeout", "store_lost",
                             "hang_undetermined", "hang_silent", "collective_missing_rank", "exception_unknown",
                             "peer_exception"),
    "missing_rank_init": _links("rendezvous_timeout", "scheduler_time_limit", "store_lost", "hang_silent",
                                "hang_undetermined", "collective_mismatch", "exception_unknown", "killed_unconfirmed"),
    "rendezvous_timeout": _links("store_lost", "exception_unknown", "scheduler_time_limit", "hang_silent",
                                 "code_error"),
    "collective_mismatch": _links("store_lost", "hang_undetermined", "hang_silent", "exception_unknown",
                                  "peer_exception", "segfault", "killed_unconfirmed", "scheduler_time_limit",
                                  "hang_all_waiting", "code_error"),
    "uneven_batches": _links("collective_mismatch", "hang_undetermined", "store_lost", "collective_missing_rank",
                             "exception_unknown", "peer_exception", "hang_silent"),
    "p2p_acs_iommu": _links("hang_undetermined", "hang_all_waiting", "hang_silent", "collective_mismatch",
                            "exception_unknown", "segfault"),
    "hang_silent": _links("scheduler_time_limit", "killed_unconfirmed", "preempted"),
    "hang_all_waiting": _links("hang_undetermined", "hang_silent", "store_lost", "exception_unknown", "segfault"),
    "hang_undetermined": _links("hang_silent", "store_lost", "exception_unknown", "segfault"),
    "collective_missing_rank": _links("collective_mismatch", "hang_undetermined", "hang_silent", "hang_all_waiting",
                                      "store_lost", "exception_unknown", "segfault"),
    "group_order_deadlock": _links("collective_mismatch", "hang_undetermined", "hang_silent", "hang_all_waiting",
                                   "collective_missing_rank"),
    "p2p_unmatched": _links("collective_mismatch", "hang_undetermined", "hang_silent", "collective_missing_rank"),
    "store_lost": _links("hang_undetermined", "unexplained_end"),
}


#: What takes a whole host, so that the ranks on it are lost to the other pool.
_OF_HOSTS = frozenset({"host_oom", "node_failure"})
#: Numbers that go wrong do not make a job run into its time limit.
_NUMBERS = ("loss_spike", "loss_divergence", "loss_resume", "loss_oscillation", "loss_plateau", "grad_", "moe_",
            "learning_", "data_")


def _graph() -> dict[str, tuple[Link, ...]]:
    graph: dict[str, tuple[Link, ...]] = {}
    for slug, row in CAUSES.items():
        links = list(_SPECIFIC.get(slug, ()))
        slow_pools = slug.startswith("pool_") and row.verdict == "degraded"  # costs time, and makes nobody hang
        if tier(slug) > 1 and row.verdict in ("failed", "degraded") and not slow_pools:
            known = {link.cause for link in links}
            mute = {"teardown_hang"} | ({"scheduler_time_limit"} if slug.startswith(_NUMBERS) else set())
            links += [Link(cause) for cause in sorted(WAITING) if cause not in known and cause not in mute]
        if row.verdict == "failed" and not slug.startswith("pool_"):  # the lost rank's own end says more than its peers
            links.append(Link("pool_member_lost", "rank"))
            links += [Link("pool_member_lost", "host")] if slug in _OF_HOSTS else []
        graph[slug] = tuple(links)
    for variant in ("cuda_oom", "cuda_oom_fragmentation", "cuda_oom_optimizer", "cuda_oom_shared_gpu"):
        graph[variant] += _links("exception_unknown", "peer_exception", "cuda_kernel_fault", "segfault", "code_error",
                                 "killed_unconfirmed")
    return graph


#: Who accounts for whom; walked by `diag.correlate`.
EXPLAINS: dict[str, tuple[Link, ...]] = _graph()
