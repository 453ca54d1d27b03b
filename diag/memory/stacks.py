"""A stack -> who asked for the memory: the line of the user's program, its module, and the phase of the step.

Snapshots mix Python frames with C++ ones and the interpreter's own. What a person can change is the innermost Python
frame that is neither torch's nor the standard library's; in the autograd threads there is none, and the name of the
backward node says what was differentiated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from diag.memory.nouns import Frame, Stacks

UNKNOWN = "no stack recorded"
#: Third-party libraries that only pass calls on.
_THROUGH = re.compile(r"(?:site|dist)-packages/(?:torch|einops|jaxtyping|beartype|typeguard|functorch|triton)/|"
                      r"torchinductor|<frozen|<eval_with_key>|<string>|<__array_function__")
_SEPARATOR = re.compile(r"[/\\]")
_STDLIB = re.compile(r"/lib/python3\.\d+/(?!(?:site|dist)-packages/)")
_TORCH = re.compile(r"(?:^|/)torch/")
_OPTIM = re.compile(r"(?:^|/)torch/optim/(?!lr_scheduler)|(?:^|/)optim(?:izers?)?(?:/|\.py$|_)|"
                    r"(?:^|/)(?:apex/optimizers|deepspeed/runtime/zero/stage|bitsandbytes/optim)", re.IGNORECASE)
_OPTIM_CALLS = re.compile(r"^(?:step|_init_group|_step|_single_tensor_\w+|_multi_tensor_\w+|_fused_\w+|wrapper|"
                          r"_use_grad|init_state|_init_state|profile_hook_step|\w*param_groups|\w*main_param\w*|"
                          r"\w*master\w*)$")
_BACKWARD = re.compile(r"autograd::Engine|autograd::Node::operator|autograd::PyNode::apply|_engine_run_backward|"
                       r"run_backward")
_NODE = re.compile(r"autograd::generated::(\w+?)Backward\d*\b|torch::autograd::(AccumulateGrad)\b")
_LEAF = re.compile(r"torch/nn/(?:modules/|functional\.py)")
_PARAMETERS = frozenset({"_apply", "convert", "to_empty", "reset_parameters", "load_state_dict", "materialize",
                         "_load_from_state_dict", "from_pretrained", "_load_pretrained_model"})
_DATA = re.compile(r"torch/utils/data/|pin_memory|dataloader|collate", re.IGNORECASE)
_COMM = re.compile(r"torch/distributed/(?!(?:utils/)?checkpoint|_tensor|tensor|algorithms/_checkpoint|launch|run)|"
                   r"c10d::|ProcessGroup", re.IGNORECASE)
_CALLS = frozenset({"_call_impl", "_wrapped_call_impl"})
_NOISE = re.compile(r"^(?:_?Py|std::|c10::impl::|_start$|__libc|clone|start_thread|torch::unwind|torch::Captured|"
                    r"torch::cuda::|c10::cuda::|at::detail::empty|\?\?|at::TensorBase|slot_|do_call|object_)")


@dataclass(frozen=True, slots=True)
class Caller:
    """What is said of one stack."""

    owner: str
    phase: str
    module: str


def callers(stacks: Stacks) -> list[Caller]:
    """One `Caller` per stack of `stacks`, in order."""
    marks = [_mark(frame) for frame in stacks.frames]
    return [_caller([stacks.frames[i] for i in members], [marks[i] for i in members]) for members in stacks.stacks]


NOBODY = Caller(UNKNOWN, "unknown", "")


@dataclass(slots=True)
class _Mark:
    python: bool
    user: bool
    phase: str
    node: str
    leaf: bool


def _mark(frame: Frame) -> _Mark:
    file, _, name = frame
    file = file.replace("\\", "/")
    python = file.endswith(".py") or file.startswith("<")
    inside = bool(_THROUGH.search(file)) or bool(_STDLIB.search(file)) or (python and bool(_TORCH.search(file)))
    phase = ""
    if python:
        if _OPTIM.search(file) and _OPTIM_CALLS.match(name):
            phase = "optimizer"
        elif name == "backward" or name == "_backward_impl":
            phase = "backward"
        elif _COMM.search(file) and inside:
            phase = "communication"
        elif _DATA.search(file) and inside:
            phase = "data"
        elif name in _PARAMETERS or (name == "__init__" and _LEAF.search(file)):
            phase = "parameters"
        elif name.startswith("forward") or name in _CALLS:
            phase = "forward"
    elif _BACKWARD.search(name):
        phase = "backward"
    elif _COMM.search(name):
        phase = "communication"
    node = _NODE.search(name)
    return _Mark(python, python and not inside, phase, (node[1] or node[2]) if node and not python else "",
                 python and bool(_LEAF.search(file)) and name == "forward")


#: When frames of several phases are in one stack: the first of these that occurs.
_ORDER = ("optimizer", "backward", "parameters", "data", "forward", "communication")


def _caller(frames: list[Frame], marks: list[_Mark]) -> Caller:
    phases = {mark.phase for mark in marks}
    phase = next((p for p in _ORDER if p in phases), "other")
    user = next((f for f, m in zip(frames, marks) if m.user), None)
    first_python = next((m for m in marks if m.python), None)
    if phase in ("forward", "other") and first_python is not None and first_python.phase == "communication":
        phase = "communication"
    node = next((m.node for m in marks if m.node), "")
    if user is not None and not (phase == "backward" and node and not _before_engine(marks)):
        owner = place(user)
    elif node:
        owner = f"backward of {node}" if node != "AccumulateGrad" else "gradients of parameters (AccumulateGrad)"
    else:
        python = next((f for f, m in zip(frames, marks) if m.python), None)
        native = next((f for f in frames if f[2] and not _NOISE.match(f[2])), None)
        owner = place(python) if python else native[2].split("(")[0][:80] if native else UNKNOWN
    module = ""
    for frame, mark in zip(frames, marks):
        if mark.user and frame[2].startswith("forward"):
            module = place(frame, line=False)
            break
    if not module:
        leaf = next((f for f, m in zip(frames, marks) if m.leaf), None)
        module = place(leaf, line=False) if leaf else ""
    if phase == "backward" and not module and node:
        module = owner
    return Caller(owner, phase if owner != UNKNOWN else "unknown", module)


def _before_engine(marks: list[_Mark]) -> bool:
    """Whether a user's frame lies inside the autograd engine (a custom backward, recomputation), not around it."""
    for mark in marks:
        if mark.user:
            return True
        if mark.node:
            return False
    return False


def place(frame: Frame, *, line: bool = True) -> str:
    """A frame as `folder/file.py:line function`, without the rest of the path.

    >>> place(("/home/me/job/model/attention.py", 57, "forward"))
    'model/attention.py:57 forward'
    """
    file, number, name = frame
    short = "/".join([part for part in _SEPARATOR.split(file) if part][-2:]) or "?"
    return f"{short}:{number} {name}" if line else f"{short} {name}"
