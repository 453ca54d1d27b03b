"""What a rank leaves when it crashes, hangs, is told to end, or is asked where it is."""

from __future__ import annotations

import pickle
import signal
import sys
import time

import pytest

from pdtrain.recorder import Recorder
from tests.recorder.helpers import events, rows, run, start, wait_for

HEAD = """
    import signal, sys, threading, time
    from pdtrain.recorder import Recorder
    recorder = Recorder(sys.argv[1], tensorboard=False, log_every=10)
    recorder.log(1, loss=0.5)
    def ready():
        print("ready", flush=True)
"""


def started(body, tmp_path, **environ):
    process = start(HEAD + body, tmp_path, **environ)
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def ended(process, timeout=30.0):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def test_an_uncaught_exception_is_in_events_and_log_and_the_waiting_metrics_are_written(tmp_path):
    done = run(HEAD + """
    def inner():
        raise ValueError("bad batch [rank3]")
    with recorder.span("forward"):
        inner()
    """, tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: bad batch [rank3]"), "the console still gets its traceback"
    crash = events(tmp_path)["exception"]
    assert (crash["type"], crash["message"], crash["last_step"]) == ("ValueError", "bad batch [rank3]", 1)
    assert "in inner" in crash["traceback"]
    assert events(tmp_path)["end"]["ok"] is False
    assert rows(tmp_path / "metrics.jsonl")[0]["loss"] == 0.5
    assert "in inner" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_an_exception_in_a_with_block_is_recorded_once(tmp_path):
    done = run("""
        import sys
        from pdtrain.recorder import Recorder
        with Recorder(sys.argv[1], tensorboard=False) as recorder:
            raise KeyError("lost")
        """, tmp_path)
    assert done.returncode == 1
    names = [row["event"] for row in rows(tmp_path / "events" / "rank_0.jsonl")]
    assert names == ["start", "exception", "end"]


@pytest.mark.parametrize("leave", ["sys.exit(0)", "sys.exit()", "pass"])
def test_leaving_in_good_order_is_no_crash(tmp_path, leave):
    done = run(HEAD + f"    {leave}", tmp_path)
    assert done.returncode == 0
    assert events(tmp_path)["end"]["ok"] is True
    assert "exception" not in events(tmp_path)


def test_a_thread_that_dies_is_recorded(tmp_path):
    done = run(HEAD + """
    thread = threading.Thread(target=lambda: 1 / 0, name="loader")
    thread.start()
    thread.join()
    """, tmp_path)
    assert done.returncode == 0
    seen = events(tmp_path)["thread_exception"]
    assert (seen["thread"], seen["type"]) == ("loader", "ZeroDivisionError")


def test_sigusr1_writes_the_stacks_of_all_threads_and_the_run_goes_on(tmp_path):
    process = started("""
    def a_thread_that_waits(event):
        event.wait()
    event = threading.Event()
    threading.Thread(target=a_thread_that_waits, args=(event,), daemon=True).start()
    def the_training_loop():
        ready()
        while True:
            time.sleep(60)
    the_training_loop()
    """, tmp_path)
    stacks = tmp_path / "dumps" / "stacks_0.txt"
    for number in (1, 2):
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda number=number: stacks.read_text().count("SIGUSR1 ====") == number)
    process.kill()
    process.communicate()
    first, line, _ = stacks.read_text().partition("==== 2")
    assert "a_thread_that_waits" in first and "the_training_loop" in first
    assert " rank 0 " in stacks.read_text() and "last step 1" in stacks.read_text()
    assert events(tmp_path)["stack_dump"]["reason"] == "SIGUSR1"


def test_sigusr1_works_while_the_interpreter_is_held(tmp_path):
    process = started("""
    import re
    ready()
    re.match("(a+)+$", "a" * 64 + "b")  # holds the GIL for longer than this test waits
    """, tmp_path)
    time.sleep(0.3)
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "re/__init__.py" in (tmp_path / "dumps" / "stacks_0.txt").read_text()
             or "in match" in (tmp_path / "dumps" / "stacks_0.txt").read_text())
    process.kill()
    process.communicate()


def test_sigusr1_still_reaches_the_programs_own_handler(tmp_path):
    process = start("""
        import signal, sys, time
        signal.signal(signal.SIGUSR1, lambda number, frame: print("mine", flush=True))
        from pdtrain.recorder import Recorder
        recorder = Recorder(sys.argv[1], tensorboard=False)
        print("ready", flush=True)
        time.sleep(60)
        """, tmp_path)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "mine\n"
    wait_for(lambda: "stack_dump" in events(tmp_path))
    process.kill()
    process.communicate()


@pytest.mark.parametrize("how", ["sleeping", "blocked in C"])
def test_sigterm_still_ends_the_process_but_nothing_that_waited_is_lost(tmp_path, how):
    waits = "time.sleep(60)" if how == "sleeping" else "lock = threading.Lock(); lock.acquire(); lock.acquire()"
    process = started(f"""
    with recorder.span("all_to_all"):
        ready()
        {waits}
    """, tmp_path)
    process.send_signal(signal.SIGTERM)
    status, _, err = ended(process)
    assert (status, err) == (-signal.SIGTERM, "")
    assert rows(tmp_path / "metrics.jsonl")[0]["loss"] == 0.5
    assert events(tmp_path)["signal"] | {"time": 0} == {
        "event": "signal", "time": 0, "signal": "SIGTERM", "open_spans": ["all_to_all"], "last_step": 1}


def test_sigterm_belongs_to_a_program_that_handles_it(tmp_path):
    process = started("""
    asked = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    ready()
    while not asked:
        time.sleep(0.01)
    recorder.log(2, loss=0.25)
    recorder.close()
    print("saved and left")
    """, tmp_path)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (0, "saved and left\n", "")
    assert [row["loss"] for row in rows(tmp_path / "metrics.jsonl")] == [0.5, 0.25]
    assert events(tmp_path)["signal"]["signal"] == "SIGTERM"
    assert events(tmp_path)["end"]["ok"] is True


def test_a_handler_that_never_gets_its_turn_costs_a_dump(tmp_path):
    process = started("""
    from pdtrain.recorder import crash
    crash.TERM_GRACE = 0.5
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    ready()
    def stuck_here():
        time.sleep(60)
    stuck_here()
    """, tmp_path)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "no sign of life since ====" in (tmp_path / "dumps" / "stacks_0.txt").read_text())
    process.kill()
    process.communicate()
    assert "stuck_here" in (tmp_path / "dumps" / "stacks_0.txt").read_text()


def test_silence_is_dumped_once_per_stall(tmp_path):
    done = run("""
        import sys, time
        from pdtrain.recorder import Recorder
        recorder = Recorder(sys.argv[1], tensorboard=False, stall_seconds=0.4)
        def stuck_here():
            time.sleep(1.5)
        for step in (1, 2):
            recorder.log(step, loss=1.0)
            with recorder.span("all_to_all"):
                stuck_here()
        recorder.close()
        """, tmp_path)
    assert done.returncode == 0
    stalls = [row for row in rows(tmp_path / "events" / "rank_0.jsonl") if row.get("event") == "stalled"]
    assert [(row["last_step"], row["open_spans"]) for row in stalls] == [(1, ["all_to_all"]), (2, ["all_to_all"])]
    text = (tmp_path / "dumps" / "stacks_0.txt").read_text()
    assert text.count("nothing logged for") == 2 and text.count("in stuck_here") == 2
    assert len(done.stderr.splitlines()) in (1, 2), "one line on the console per stall, the same text once"


def test_a_forked_child_neither_records_nor_is_taken_for_the_run(tmp_path):
    done = run(HEAD + """
    import os
    with recorder.span("parent"):
        child = os.fork()
        if child == 0:
            recorder.log(7, loss=7.0)
            recorder.event("from_the_child")
            time.sleep(60)
        time.sleep(0.3)
        os.kill(child, signal.SIGTERM)  # as a data loader ends its workers
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    time.sleep(0.3)
    child = os.fork()
    if child == 0:
        raise SystemError("the child's own trouble")
    os.waitpid(child, 0)
    recorder.log(2, loss=2.0)
    """, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert list(events(tmp_path)) == ["start", "end"]


def test_hooks_and_signals_are_put_back(tmp_path):
    before = (sys.excepthook, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1))
    recorder = Recorder(tmp_path, tensorboard=False)
    assert sys.excepthook != before[0]
    recorder.close()
    assert (sys.excepthook, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    assert signal.set_wakeup_fd(-1) == -1


RANK = """
    import os, sys, time
    from datetime import timedelta
    from pdtrain.recorder import Recorder, prepare_environment
    prepare_environment(sys.argv[1], 100)
    import torch
    import torch.distributed as dist
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2,
                            timeout=timedelta(seconds=60))
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    recorder = Recorder(sys.argv[1], tensorboard=False)
    for step in range(1, 4):
        with recorder.span("all_reduce"):
            if rank == 1 and step == 3:
                {trouble}
            dist.all_reduce(torch.ones(4))
        recorder.log(step, loss=1.0)
"""


@pytest.mark.parametrize("trouble", [
    pytest.param("raise RuntimeError('bad batch')", id="exception"),
    pytest.param("time.sleep(60)", id="sleep"),
    pytest.param("while True: pass", id="busy", marks=pytest.mark.slow),
])
def test_a_collective_that_fails_leaves_flight_recorder_dumps(tmp_path, trouble):
    run_dir = tmp_path / "run"
    ranks = [start(RANK.format(trouble=trouble), run_dir, tmp_path / "store", RANK=str(rank), WORLD_SIZE="2")
             for rank in (0, 1)]
    assert ended(ranks[0])[0] == 1
    if "raise" not in trouble:
        ranks[1].send_signal(signal.SIGTERM)  # what torchrun does next
    status, _, _ = ended(ranks[1])
    assert status == (1 if "raise" in trouble else -signal.SIGTERM)
    files = [run_dir / "dumps" / f"flight_recorder_{rank}" for rank in (0, 1)]
    dumps = [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - our own children's
    issued = [[entry["profiling_name"] for entry in dump["entries"]].count("gloo:all_reduce") for dump in dumps]
    assert issued == [3, 2], "rank 1 never issued the third"
    assert events(run_dir, 0)["exception"]["open_spans"] == ["all_reduce"]
    assert events(run_dir, 0)["exception"]["last_step"] == 2
    assert events(run_dir, 0)["flight_recorder_dump"]["file"] == "flight_recorder_0"
    last = events(run_dir, 1)["exception" if "raise" in trouble else "signal"]
    assert last["open_spans"] == ["all_reduce"]


def test_dumps_of_an_earlier_incident_are_set_aside(tmp_path):
    dumps = tmp_path / "dumps"
    for incident in (b"first", b"second"):
        recorder = Recorder(tmp_path, tensorboard=False)
        (dumps / "flight_recorder_0").write_bytes(incident)
        recorder.close()
    Recorder(tmp_path, tensorboard=False).close()
    kept = {str(path.relative_to(dumps)): path.read_bytes() for path in dumps.rglob("*") if path.is_file()}
    assert kept == {"earlier_1/flight_recorder_0": b"first", "earlier_2/flight_recorder_0": b"second"}
