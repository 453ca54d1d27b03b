"""Judgement of versions and libraries: does torch fit the driver, the GPUs and the libraries beside it?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from diag.detectors import NotChecked
from diag.probes import hardware
from diag.probes.host_words import Place
from diag.schema import Finding


def check(place: Place) -> Iterator[Finding | NotChecked]:
    """Everything about the software of one host."""
    facts = place.facts
    if "torch" not in facts.packages:
        if place.live:
            yield NotChecked("torch: not installed in this Python")
    else:
        yield from builds(place)
    yield from pins(place)
    yield from nccl(place)


def builds(place: Place) -> Iterator[Finding]:
    """The CUDA that torch was built for, the driver's and the GPUs'."""
    facts = place.facts
    torch, built, driver = facts.packages["torch"], facts.torch_cuda, facts.driver_cuda
    if facts.gpus and built is None and facts.torch_rocm is None and facts.kernel:
        yield place.finding("driver_mismatch", "error", f"torch {torch} was built without CUDA and this host has "
                            f"{len(facts.gpus)} NVIDIA GPUs", at="torch/version.py", text="cuda: None",
                            fix=["Install the CUDA build of torch (pip's --index-url of pytorch.org, or the default "
                                 "wheel)."])
    if built and driver and _version(driver)[:1] < _version(built)[:1]:
        yield place.finding("driver_mismatch", "error", f"torch {torch} needs CUDA {built} and the driver "
                            f"{facts.driver} offers {driver}", at="torch/version.py",
                            text=f"torch: CUDA {built}; driver: CUDA {driver}",
                            fix=["Update the driver, install the compatibility package (cuda-compat), or take a torch "
                                 "built for the driver's CUDA."])
    for name in sorted({gpu.name for gpu in facts.gpus}):
        model = hardware.gpu_of(name)
        if model is not None and built and model.cuda and _version(built) < _version(model.cuda):
            yield place.finding("no_kernel_image", "error", f"torch {torch} is built with CUDA {built}; {name} needs "
                                f"{model.cuda}", at="torch/version.py", text=f"CUDA {built} < {model.cuda}")


def pins(place: Place) -> Iterator[Finding]:
    """What torch pins exactly (its CUDA libraries, NCCL, Triton) against what is installed."""
    facts = place.facts
    for key, wanted in sorted(facts.pins.items()):
        name = key.partition(": ")[2]
        have = facts.packages.get(name)
        if have is None or have == wanted or have.split("+")[0] == wanted:
            continue
        cause = "nccl_version_mismatch" if "nccl" in name else "library_mismatch"
        yield place.finding(cause, "warning", f"torch {facts.packages.get('torch', '')} wants {name} {wanted}, "
                            f"installed is {have}", at="site-packages", text=f"{name} {have}, wanted {wanted}",
                            package=name, fix=[f"pip install '{name}=={wanted}', or install torch anew."])
    torch, numpy = facts.packages.get("torch", ""), facts.packages.get("numpy", "")
    if torch and numpy and _version(torch) < (2, 3) and _version(numpy) >= (2,):
        yield place.finding("library_mismatch", "warning", f"torch {torch} was built before numpy 2 and numpy {numpy} "
                            "is installed: tensors and arrays cannot be exchanged", at="site-packages",
                            text=f"torch {torch}, numpy {numpy}", fix=["pip install 'numpy<2', or update torch."])
    flavours = sorted({found[1] for name in facts.packages if (found := re.fullmatch(r"nvidia-nccl-(cu\d+)", name))})
    if len(flavours) > 1:
        yield place.finding("nccl_version_mismatch", "warning", f"NCCL is installed for {' and '.join(flavours)} in "
                            "one environment; both write the same file", at="site-packages", text=", ".join(flavours),
                            fix=["Uninstall both, then install torch anew."])


def nccl(place: Place) -> Iterator[Finding]:
    """A second NCCL that LD_PRELOAD or LD_LIBRARY_PATH puts before torch's own.

    A copy among the system's libraries is normal and not used by torch's wheels.
    """
    facts = place.facts
    own = next((v for name, v in facts.packages.items() if re.fullmatch(r"nvidia-nccl-cu\d+", name)), None)
    forced = {path: version for path, version in facts.nccl_libraries.items()
              if path in facts.variables.get("LD_PRELOAD", "")
              or any(path.startswith(folder.rstrip("/") + "/")
                     for folder in facts.variables.get("LD_LIBRARY_PATH", "").split(":") if folder)}
    for path, version in forced.items():
        if own and version and "site-packages" not in path and _version(version)[:3] != _version(own)[:3]:
            yield place.finding("nccl_version_mismatch", "warning", f"{path} is NCCL {version} and comes before "
                                f"torch's {own}", at="LD_LIBRARY_PATH", text=path,
                                fix=["Remove it from LD_LIBRARY_PATH and LD_PRELOAD, or make sure that every host has "
                                     "the same."])


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:4])
