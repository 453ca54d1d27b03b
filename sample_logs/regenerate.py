"""Make the sample runs anew: real jobs on this machine's CPUs, broken on purpose, in neutral names.

    python sample_logs/regenerate.py                   # everything; several minutes
    python sample_logs/regenerate.py killed-rank …     # only these
    python sample_logs/regenerate.py --reports [NAME…] # keep the runs, write what the doctor says of them now

A sample is a folder with what a run left behind, and report.json: what `pdtrain diag postmortem` must say of it. After
--reports read the diff: each change of a verdict needs a reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

from neutral import Neutral  # noqa: E402

from tests.diag.real.launcher import JOB, launch, run_to_the_end  # noqa: E402

#: Never part of a sample: weights, pictures of curves, and torchrun's empty files.
LEFT_OUT = ("checkpoints", "tensorboard", "train.py", "final.pt", "step_100.pt")

#: A small MoE on two ranks that is done in a minute.
SMALL = ("model.hidden=64", "model.layers=3", "model.ffn_hidden=128", "model.heads=4", "model.kv_heads=2",
         "model.head_dim=16", "model.moe.expert_hidden=64", "train.sequence_length=64", "train.val_sequences=8",
         "train.val_every=0", "checkpoint.every=12", "recorder.tensorboard=false", "optimizer.warmup_steps=5",
         "recorder.spans=false", "recorder.flight_recorder_entries=6",
         "optimizer.lr=5e-4", "model.moe.aux_loss=0.1")


def gloo(*arguments: str, **options: object) -> Callable[[Path], None]:
    """The broken job under torchrun; in the sample it is called train.py."""

    def make(folder: Path) -> None:
        job = folder / "train.py"
        shutil.copy(JOB, job)
        launch(folder, *arguments, job=job, **options)  # type: ignore[arg-type]

    return make


def trainer(*settings: str, steps: int = 160) -> Callable[[Path], None]:
    """`pdtrain train` with the small model and these keys; of its metrics every fifth line is kept."""

    def make(folder: Path) -> None:
        train(folder, *settings, f"train.steps={steps}", "checkpoint.every=80")
        metrics = folder / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[::5]))

    return make


def train(folder: Path, *settings: str, extra: tuple[str, ...] = ()) -> None:
    """One `pdtrain train` into `folder`, its console in console.log."""
    options = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "pdtrain.cli", "train", "--preset", "tiny", *options, "--run-dir", str(folder),
               *extra]
    run_to_the_end(command, folder.with_name("console.log"))
    with (folder / "console.log").open("a") as whole:
        whole.write(folder.with_name("console.log").read_text())


def order_with_dumps(folder: Path) -> None:
    """Two groups used in another order by one rank: only the flight recorder shows who."""
    gloo("order", world=4, TORCH_FR_BUFFER_SIZE="2000", DUMPS=str(folder))(folder)


def slow_with_dumps(folder: Path) -> None:
    """One rank works far longer than the others' patience; the flight recorders are kept."""
    gloo("sleep", world=4, TORCH_FR_BUFFER_SIZE="2000", DUMPS=str(folder))(folder)


def log_tree(*arguments: str) -> Callable[[Path], None]:
    """The job with torchrun's folder of per-rank files, and prefixed lines on the console."""

    def make(folder: Path) -> None:
        tree = folder / "logs"
        gloo(*arguments, torchrun=("--standalone", "--log-dir", str(tree), "--redirects", "3", "--tee", "3"))(folder)
        for part in tree.rglob("attempt_*"):
            shutil.copytree(part, tree / part.name, dirs_exist_ok=True)
        for run in tree.glob("*_*"):
            if run.is_dir() and not run.name.startswith("attempt"):
                shutil.rmtree(run)

    return make


def port_in_use(folder: Path) -> None:
    """Somebody else listens on the master port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        gloo("none", torchrun=("--master-addr", "127.0.0.1", "--master-port", port), world=4)(folder)


def node_never_joins(folder: Path) -> None:
    """Two nodes were asked for, one was started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gloo("none", world=4, torchrun=("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
                                    "--rdzv-conf", "join_timeout=8,timeout=20"))(folder)


def trainer_killed(folder: Path) -> None:
    """The trainer, whose rank 1 is killed in the middle of a step."""

    def kill() -> None:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            metrics = folder / "metrics.jsonl"
            if metrics.exists() and metrics.read_bytes().count(b"\n") > 15:
                for process in _ranks(folder):
                    os.kill(process, signal.SIGKILL)
                return
            time.sleep(0.05)

    threading.Thread(target=kill, daemon=True).start()
    train(folder, "train.steps=200")


def _ranks(folder: Path) -> list[int]:
    """The process of rank 1 of the run in `folder`."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if str(folder) in " ".join(process.info["cmdline"] or ()) and process.environ().get("RANK") == "1":
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def trainer_resumed(folder: Path) -> None:
    """A healthy run in two parts: ended at step 12, resumed to 24."""
    train(folder, "train.steps=12", "optimizer.schedule=constant", "optimizer.lr=2e-4")
    train(folder, "train.steps=24", "optimizer.schedule=constant", "optimizer.lr=2e-4", extra=("--resume",))


SAMPLES: dict[str, Callable[[Path], None]] = {
    "healthy-console": gloo("none", "--steps", "12"),
    "healthy-log-tree": log_tree("none"),
    "healthy-run-directory": trainer(),
    "healthy-resumed": trainer_resumed,
    "exception-one-rank": log_tree("exception"),
    "killed-rank": gloo("kill"),
    "stopped-rank": gloo("stop"),
    "slow-rank": slow_with_dumps,
    "size-mismatch": gloo("size", TORCH_DISTRIBUTED_DEBUG="DETAIL"),
    "wrong-collective": gloo("operation"),
    "group-order": order_with_dumps,
    "leaves-loop-early": gloo("early"),
    "out-of-memory": gloo("memory"),
    "segfault": gloo("segfault"),
    "truncated-checkpoint": gloo("checkpoint"),
    "port-in-use": port_in_use,
    "node-never-joins": node_never_joins,
    "router-collapse": trainer("model.moe.aux_loss=0", "modules.router.lr_scale=30", "optimizer.lr=3e-3",
                               "optimizer.schedule=constant"),
    "trainer-killed": trainer_killed,
}


def make(name: str) -> None:
    """Run one sample's job and put what it left, in neutral names, into the sample's folder."""
    with tempfile.TemporaryDirectory(prefix="pdtrain-sample-") as scratch:
        folder = Path(scratch) / name
        folder.mkdir()
        SAMPLES[name](folder)
        target = HERE / name
        shutil.rmtree(target, ignore_errors=True)
        neutral = Neutral(folder, f"/home/ada/runs/{name}")
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and path.stat().st_size and not set(inside.parts) & set(LEFT_OUT):
                neutral.file(path, target / inside)


def report(name: str) -> str:
    """What the doctor says of the sample, as JSON; paths are relative to the repository."""
    command = [sys.executable, "-m", "pdtrain.cli", "diag", "postmortem", f"sample_logs/{name}", "--json"]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the sample runs anew.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(SAMPLES)}")
    parser.add_argument("--reports", action="store_true", help="keep the runs; only write the reports anew")
    options = parser.parse_args()
    for name in options.names or SAMPLES:
        if name not in SAMPLES:
            parser.error(f"{name}: not a sample; one of {', '.join(SAMPLES)}")
        if not options.reports:
            make(name)
        (HERE / name / "report.json").unlink(missing_ok=True)
        (HERE / name / "report.json").write_text(report(name))
        print(name)


if __name__ == "__main__":
    main()
