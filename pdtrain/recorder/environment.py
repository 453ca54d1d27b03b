"""What a run was: `config.toml`, `environment.json`, and the switches that must be set before torch.distributed.

Imports no torch, so that a launcher can call `prepare_environment` before anything else. Nothing secret is written:
values whose name looks like a credential are replaced, in the environment and on the command line.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdtrain.recorder.files import plain, write_atomically

REDACTED = "[redacted]"
#: Packages whose versions decide how a run behaves.
PACKAGES = ("pdtrain", "torch", "numpy", "tokenizers", "safetensors", "msgspec", "tensorboard", "triton", "wandb",
            "nvidia-nccl-cu12", "nvidia-nccl-cu13", "transformer-engine", "flash-attn")
#: Variables that change what a distributed job does. Everything else stays private.
VARIABLES = re.compile(
    r"^(NCCL_|TORCH|PYTORCH_|CUDA_|GLOO_|UCX_|FI_|OMPI_COMM_WORLD_|OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|SLURM_"
    r"|TRITON_|C10D_|TCPSTORE_|PYTHON(HASHSEED|FAULTHANDLER|UNBUFFERED)$|PDTRAIN_|CUBLAS_|NVTE_|HSA_|HIP_|ROCR_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_RANK|ROLE_NAME|NODE_RANK|MASTER_ADDR|MASTER_PORT"
    r"|VIRTUAL_ENV|CONDA_DEFAULT_ENV|TOKENIZERS_PARALLELISM|MALLOC_ARENA_MAX|LD_PRELOAD|LD_LIBRARY_PATH)$)"
)
_SECRET = re.compile(
    r"(?i)secret|token|password|passwd|passphrase|credential|auth(?!or)|jwt|cookie|^-*key$|(^|[-_.])(pass|pwd|pat)$"
    r"|(api|access|private|ssh|ssl|sign(ing)?|encryption|account|licen[cs]e|wandb|openai|hf|hub|aws|azure|gcp|s3)[-_.]?key"
)
_NOT_SECRET = re.compile(r"(?i)token(izer|izers_parallelism|s$|s[-_.])")
_URL_LOGIN = re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^/@\s]+@")
_KNOWN_SECRET = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}"
                           r"|AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}[A-Za-z0-9_.-]*)")


def prepare_environment(
    run_dir: str | os.PathLike[str], entries: int = 2000, environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Switch the flight recorder on, writing to `<run_dir>/dumps/flight_recorder_<rank>`; 0 entries switch it off.

    Call it in the launcher (pass the workers' `environ`) or in each worker before the first process group is made:
    c10d reads these variables once. A value that the user has set stays. Returns what is in force.
    """
    target = os.environ if environ is None else environ
    dumps = Path(run_dir).absolute() / "dumps"
    wanted = {
        "TORCH_FR_BUFFER_SIZE": str(entries),
        "TORCH_FR_DUMP_TEMP_FILE": str(dumps / "flight_recorder_"),  # the rank is appended
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1" if entries else "0",
    }
    for name, value in wanted.items():
        target.setdefault(name, value)
    if entries:  # c10d's own writer makes no directory; a full or read-only disk must not stop the run
        try:
            dumps.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"pdtrain recorder: no directory for dumps: {error}", file=sys.stderr)
    return {name: target[name] for name in wanted}


def write_config(run_dir: str | os.PathLike[str], toml_text: str) -> Path:
    """Write the resolved configuration to `<run_dir>/config.toml`, atomically. Raises OSError."""
    path = Path(run_dir) / "config.toml"
    write_atomically(path, toml_text.encode())
    return path


def write_environment(run_dir: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> Path:
    """Write `<run_dir>/environment.json`: what `describe()` finds, and `extra` (resolved groups, the preset's name).

    Raises OSError.
    """
    path = Path(run_dir) / "environment.json"
    document = describe() | dict(extra or {})
    write_atomically(path, msgspec.json.format(msgspec.json.encode(plain(document)), indent=2) + b"\n")
    return path


def describe() -> dict[str, Any]:
    """Versions, host, devices, command line and environment variables of this process, without secrets."""
    found: dict[str, Any] = {
        "time": time.time(),
        "versions": versions(),
        "host": host(),
        "gpus": gpus(),
        "command": redact_command(_command_line()),
        "working_directory": str(Path.cwd()),
        "environment": redact_variables(os.environ),
    }
    commit = _git_commit(Path.cwd())
    if commit:
        found["git_commit"] = commit
    return found


def versions() -> dict[str, str]:
    """Python, and the installed ones among `PACKAGES`; CUDA and NCCL where torch was built with them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")  # described if the run uses it, never imported for this
    if torch is not None and torch.version.cuda:
        found["cuda"] = torch.version.cuda
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def host() -> dict[str, Any]:
    """Name, operating system, processor and memory of this host. Needs psutil for the memory."""
    found: dict[str, Any] = {
        "name": socket.gethostname(), "platform": platform.platform(), "machine": platform.machine(),
        "cpu": _cpu_model(), "cpus": os.cpu_count(),
    }
    if hasattr(os, "sched_getaffinity"):
        found["cpus_usable"] = len(os.sched_getaffinity(0))
    try:
        import psutil

        found["memory_bytes"] = psutil.virtual_memory().total
    except (ImportError, OSError):
        pass
    return found


def gpus() -> list[dict[str, Any]]:
    """Name, memory, PCI bus id, uuid and driver of the GPUs that the driver shows; empty where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, or no permission: all mean that nothing can be said
        return []
    found = []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.append({
                "index": index, "name": _text(pynvml.nvmlDeviceGetName(handle)),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                "pci_bus_id": _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)), "driver": driver,
            })
    except pynvml.NVMLError:
        pass
    finally:
        pynvml.nvmlShutdown()
    return found


def redact_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that `VARIABLES` selects, secrets replaced."""
    return {name: REDACTED if _secret_name(name) else _redact_text(value)
            for name, value in sorted(environ.items()) if VARIABLES.match(name)}


def redact_command(arguments: Sequence[str]) -> list[str]:
    """A command line whose secrets are replaced: `--api-key X`, `token=X`, `https://user:password@host`."""
    found: list[str] = []
    value_is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if value_is_secret and not argument.startswith("-"):
            found.append(REDACTED)
            value_is_secret = False
        elif equals and _secret_name(name):
            found.append(f"{name}={REDACTED}")
            value_is_secret = False
        else:
            found.append(_redact_text(argument))
            value_is_secret = not equals and argument.startswith("-") and _secret_name(argument)
    return found


def _secret_name(name: str) -> bool:
    return bool(_SECRET.search(_NOT_SECRET.sub("", name)))


def _redact_text(text: str) -> str:
    return _KNOWN_SECRET.sub(REDACTED, _URL_LOGIN.sub(rf"\1{REDACTED}@", text))


def _command_line() -> list[str]:
    arguments = list(getattr(sys, "orig_argv", None) or sys.argv)
    return arguments or [sys.executable]


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open() as stream:
            for row in stream:
                if row.startswith("model name"):
                    return row.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _git_commit(folder: Path) -> str | None:
    """The commit checked out around `folder`, read from files: no process is started for it."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        try:
            head = (git / "HEAD").read_text().strip()
            if not head.startswith("ref: "):
                return head
            name = head.removeprefix("ref: ")
            loose = git / name
            if loose.is_file():
                return loose.read_text().strip()
            for row in (git / "packed-refs").read_text().splitlines():
                if row.endswith(" " + name):
                    return row.split()[0]
            return None
        except OSError:
            continue
    return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
