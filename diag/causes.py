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
    Cause("straggler", "one rank is persistently slower than its peers (which phase, since when)", "degraded"),
    Cause("ckpt_incomplete", "a save was interrupted: commit mark, tracker or shards missing", "degraded"),
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

EXPLAINS: dict[str, tuple[Link, ...]] = {
    "moe_router_collapse": (Link("moe_expert_imbalance"), Link("moe_token_drop")),
    "moe_expert_imbalance": (Link("moe_token_drop"),),
}
