"""From a source's key to role and parameter: which weight does `optimizer.state.exp_avg.decoder...` belong to?

    classify("optimizer.state.layers.0.wq.weight.exp_avg")     -> ("exp_avg", "layers.0.wq.weight")
    classify("optimizer.state.exp_avg.decoder.layers.mlp.weight")  -> ("exp_avg", "decoder.layers.mlp.weight")

The first order is torch's flattened optimizer state dict (torchtitan, OLMo-core, accelerate's FSDP, this trainer), the
second Megatron's dist-checkpointing. Model keys carry a container prefix ("model.", "app.model.", "module.") or none,
and "model." is also a legitimate first part of a Hugging Face name; `settle` decides by what makes weights and moments
meet.
"""

from __future__ import annotations

import re

from diag.checkpoints.canonical import Checkpoint, Role, Tensor

#: optimizer key -> role; what is not here is "state" (momentum_buffer, max_exp_avg_sq, ...).
STATE_ROLES: dict[str, Role] = {
    "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "step",
    "fp32_param": "master", "master_param": "master", "master": "master", "fp32": "master", "param": "master",
    "fp32_from_fp16_params": "master", "main": "master",
}
_STATE_KEYS = "|".join([*STATE_ROLES, "max_exp_avg_sq", "momentum_buffer", "acc_delta", "square_avg", "mu", "nu"])
_OPTIMIZER = re.compile(
    r"(?:^|\.)(?:chained_\d+\.)?(?:optim|optimizer|optimizers|optimizer_state|optim_state)(?:_\d+)?"
    r"(?:\.\d+)?\.(?:optimizer\.)?(?:state\.)?(?P<rest>.+)$"
)
_TRAILING = re.compile(rf"^(?P<fqn>.+)\.(?P<key>{_STATE_KEYS})$")
_LEADING = re.compile(rf"^(?P<key>{_STATE_KEYS})\.(?P<fqn>.+)$")
_EXPERT = re.compile(
    r"(?:^|\.)(?:local_|deepspeed_)?(?:moe_)?experts?(?:\.(?:local_|deepspeed_)?experts)?\.(?P<id>\d+)\.")
_STACKED = re.compile(r"(?:^|[._])experts?[._]")
_BUFFER = re.compile(
    r"(?:^|[._])(?:e_score_correction_bias|expert_bias|inv_freq|running_mean|running_var|num_batches_tracked|"
    r"freqs_cis|rotary_pos_emb|tokens_per_expert|local_tokens_per_expert|max_vio)(?:$|[._])")
_SCALE = re.compile(r"(?:weight_scale_inv|weight_scale|input_scale|_scale_inv|\.scales?)$")
#: Names of random-number states.
RNG = re.compile(r"(?:^|[._/])rng|random_state|cuda_rng|seed_state", re.IGNORECASE)
#: What stands before a parameter's own name, tried in this order.
PREFIXES = ("", "model.", "module.", "app.model.", "state.model.", "model.module.", "model.model.", "net.",
            "module.module.")


def classify(name: str) -> tuple[Role, str]:
    """(role, parameter it belongs to, still with the model's prefix if any) of a tensor's key."""
    optimizer = _OPTIMIZER.search(name)
    if optimizer is not None:
        rest = optimizer["rest"]
        match = _TRAILING.match(rest) or _LEADING.match(rest)
        if match is None:
            return "state", name
        return STATE_ROLES.get(match["key"], "state"), match["fqn"]
    if _SCALE.search(name) or RNG.search(name):
        return "state", name
    return ("buffer" if _BUFFER.search(name) else "parameter"), name


def is_rng(name: str) -> bool:
    """Whether `name` is that of a random-number state."""
    return RNG.search(name) is not None


def expert_of(name: str) -> int | None:
    """The expert's id in a name that has one tensor per expert, else None."""
    match = _EXPERT.search(name)
    return int(match["id"]) if match else None


def expert_family(name: str) -> str:
    """`name` with the expert's id replaced by `*`: equal for the same matrix of all experts of a layer."""
    match = _EXPERT.search(name)
    return name if match is None else f"{name[: match.start('id')]}*{name[match.end('id'):]}"


def stacked_expert_axis(name: str, shape: tuple[int, ...]) -> int | None:
    """0 for a tensor that stacks all experts of a layer ([experts, in, out]), else None."""
    return 0 if len(shape) >= 3 and _EXPERT.search(name) is None and _STACKED.search(name) else None


def annotate(tensor: Tensor) -> Tensor:
    """Fill role, fqn and expert of a tensor from its name; returns it."""
    tensor.role, tensor.fqn = classify(tensor.name)
    tensor.expert = expert_of(tensor.fqn)
    tensor.expert_axis = stacked_expert_axis(tensor.fqn, tensor.shape)
    return tensor


def settle(checkpoint: Checkpoint) -> None:
    """Take the container's prefix off the parameters, so that they meet their optimizer states.

    The prefix that makes most of them meet wins; without optimizer states, nothing is cut.
    """
    states = {t.fqn for t in checkpoint.tensors.values() if t.role in ("exp_avg", "exp_avg_sq", "master", "step")}
    plain = [t for t in checkpoint.tensors.values() if t.role in ("parameter", "buffer")]
    if not states:
        return
    counts = {p: sum(t.name.startswith(p) and t.name[len(p) :] in states for t in plain) for p in PREFIXES}
    best = max(PREFIXES, key=lambda p: counts[p])
    if counts[best]:
        for tensor in plain:
            tensor.fqn = tensor.name.removeprefix(best)
