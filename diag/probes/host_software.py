"""Versions and libraries, learnt without importing any of them: distribution metadata and file names."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from diag.probes.host_facts import HostFacts

#: Distributions whose version decides whether ranks can talk to each other and load each other's checkpoints.
_WANTED = re.compile(
    r"^(?:torch|torchvision|torchaudio|triton|numpy|deepspeed|megatron-core|transformer-engine|transformers|accelerate"
    r"|flash-attn|apex|xformers|safetensors|pdtrain|nvidia-ml-py|pynvml|nvidia-[\w-]+-cu\d+|nvidia-nccl-cu\d+"
    r"|cuda-python|cupy-cuda\d+x|jax|tensorflow)$", re.I)
_PIN = re.compile(r"^([\w.-]+)\s*(?:\(==|==)\s*([\w.+!]+)\)?")
#: Variables that change what a distributed program does; their values belong to the facts of a host.
VARIABLE_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "PYTORCH_", "TORCHELASTIC_", "CUDA_", "UCX_", "FI_", "OMP_", "MKL_",
                     "KMP_", "RDMAV_", "IBV_", "TRITON_", "TORCHINDUCTOR_", "DEEPSPEED_", "MASTER_", "TP_SOCKET_IFNAME")
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "LD_LIBRARY_PATH", "LD_PRELOAD",
             "TMPDIR", "HOME", "PYTHONPATH", "PYTHONNOUSERSITE", "NVIDIA_VISIBLE_DEVICES", "SLURM_JOB_ID",
             "SLURM_NTASKS", "HF_HOME", "XDG_CACHE_HOME", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
#: Of a file of NCCL that is read; they hold a few lines.
CONF_BYTES = 64 << 10
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL", re.I)


def gather(facts: HostFacts, environ: Mapping[str, str], root: Path = Path("/")) -> None:
    """Fill versions, pins, NCCL libraries and variables."""
    facts.python = ".".join(map(str, sys.version_info[:3]))
    for item in importlib.metadata.distributions():
        name = _name(item)
        if name and _WANTED.match(name) and name.lower() not in facts.packages:
            facts.packages[name.lower()] = item.version
            if name.lower() == "torch":
                _torch(facts, item)
    facts.nccl_libraries = nccl_libraries(environ, root)
    facts.variables = variables(environ)
    nccl_conf(facts, environ, root)


def _name(item: importlib.metadata.Distribution) -> str:
    """The distribution's name from its folder: reading METADATA of some hundred packages takes half a second."""
    path = getattr(item, "_path", None)
    if path is not None and str(path).endswith(".dist-info"):
        return Path(path).name.removesuffix(".dist-info").rsplit("-", 1)[0].replace("_", "-")
    return item.metadata["Name"] or "" if item.metadata else ""


def _torch(facts: HostFacts, item: importlib.metadata.Distribution) -> None:
    """What the installed torch was built with, and what it pins."""
    for line in item.requires or ():
        wanted, _, condition = line.partition(";")
        found = _PIN.match(wanted.strip())
        if found and "extra ==" not in condition and _applies(condition):
            facts.pins[f"torch: {found[1].lower()}"] = found[2]
    try:
        text = Path(str(item.locate_file("torch/version.py"))).read_text("utf-8")
    except OSError:
        return
    values = dict(re.findall(r"^(\w+)(?:\s*:[^=]+)?\s*=\s*'([^']*)'", text, re.M))
    facts.torch_cuda, facts.torch_rocm = values.get("cuda"), values.get("hip")


def _applies(condition: str) -> bool:
    """Whether a marker speaks of this platform, as far as torch's own markers need."""
    if 'platform_system == "Linux"' in condition or "platform_system == 'Linux'" in condition:
        machine = os.uname().machine if hasattr(os, "uname") else ""
        return sys.platform == "linux" and ("x86_64" not in condition or machine == "x86_64")
    return "Windows" not in condition and "Darwin" not in condition


def nccl_libraries(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Files libnccl.so* that LD_PRELOAD, LD_LIBRARY_PATH, the system and Python's packages offer -> version."""
    folders = [Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part.startswith("/")]
    folders += [root / name for name in ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/lib",
                                         "usr/local/cuda/lib64", "usr/lib64", "opt/nccl/lib")]
    folders += [Path(entry) / "nvidia/nccl/lib" for entry in sys.path if entry.endswith("site-packages")]
    found: dict[str, str] = {}
    for preload in re.split(r"[: ]", environ.get("LD_PRELOAD", "")):
        if "libnccl.so" in preload:
            found[preload] = _version(Path(preload))
    for folder in folders:
        try:
            names = sorted(folder.glob("libnccl.so*"))
        except OSError:
            continue
        for name in names[-1:]:
            found[str(name)] = _version(name)
    return found


def _version(path: Path) -> str:
    """The version that the name of the library, links resolved, ends in: libnccl.so.2.27.5."""
    try:
        name = path.resolve().name
    except OSError:
        name = path.name
    found = re.search(r"libnccl\.so\.(\d+\.\d+\.\d+)", name)
    return found[1] if found else ""


def nccl_conf(facts: HostFacts, environ: Mapping[str, str], root: Path = Path("/")) -> None:
    """Variables from NCCL's files, as NCCL's setEnvFile (src/misc/param.cc) reads them: nothing is trimmed.

    The environment wins; then the file that NCCL_CONF_FILE names, or ~/.nccl.conf of the user; then /etc/nccl.conf.
    """
    own = environ.get("NCCL_CONF_FILE", "")
    names = [Path(own)] if own else [root / str(home).lstrip("/") / ".nccl.conf"] if (home := _home()) else []
    if own and not Path(own).is_file():
        facts.conf_odd.append(f"{own}: no such file (NCCL_CONF_FILE)")
    for path in (*names, root / "etc/nccl.conf"):
        try:
            with path.open("rb") as stream:
                text = stream.read(CONF_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        for line in text.split("\n"):
            name, equals, value = line.partition("=")
            if line.startswith("#") or not line.strip() or _SECRET.search(line):
                continue
            if not equals or not re.fullmatch(r"[A-Z0-9_]+", name):
                facts.conf_odd.append(f"{path}: {line[:80]}")
            elif name not in facts.variables:
                facts.variables[name], facts.variable_files[name] = value[:1023], str(path)
            elif name not in facts.variable_files and value != facts.variables[name]:
                facts.overridden.setdefault(name, f"{value[:80]} ({path})")


def _home() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_dir
    except (ImportError, KeyError):
        return ""


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to a distributed run, without secrets."""
    return {name: value[:4096] for name, value in sorted(environ.items())
            if (name.startswith(VARIABLE_PREFIXES) or name in VARIABLES) and not _SECRET.search(name)}
