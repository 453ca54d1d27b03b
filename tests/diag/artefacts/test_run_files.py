"""config.toml, environment.json and events of a run directory."""

from __future__ import annotations

import pytest

from diag.artefacts import Unreadable, memory_source, recognise, run_config, run_environment, run_events
from diag.artefacts.step_times import MAX_BINS
from tests.diag.helpers import config

EVENTS = (b'{"event":"start","time":100.5,"rank":3,"host":"n1"}\n'
          b'{"span":"forward","step":1,"start":101.0,"seconds":0.5}\n'
          b'{"span":"forward","step":2,"start":102.0,"seconds":1.5}\n')
ENVIRONMENT = b'{"time": 1.0, "versions": {"torch": "2.13.0"}, "host": {"name": "n1"}, "command": ["pdtrain"]}'


@pytest.mark.parametrize("module, name, data", [
    (run_config, "config.toml", config().encode()), (run_environment, "environment.json", ENVIRONMENT),
    (run_events, "rank_3.jsonl", EVENTS),
    (run_events, "rank_3.jsonl", EVENTS.replace(b":", b" : ").replace(b",", b", ")),
])
def test_each_file_is_recognised_by_content(module, name: str, data: bytes) -> None:
    assert recognise(memory_source(data, name)) is module
    assert recognise(memory_source(data, "renamed")) is module


@pytest.mark.parametrize("module, name, data", [
    (run_config, "config.toml", b"[model]\n[train]\nsteps = \n"),
    (run_environment, "environment.json", ENVIRONMENT[:-5]),
    (run_environment, "environment.json", b"[" * 100_000), (run_config, "config.toml", b"\xff\xfe[model]"),
    (run_events, "rank_3.jsonl", b'{"event":"st'),
])
def test_damage_is_a_value_with_the_place(module, name: str, data: bytes) -> None:
    item = module.read(memory_source(data, name))
    assert isinstance(item, Unreadable) and item.problem


def test_config_answers_dotted_keys_and_never_guesses() -> None:
    found = run_config.read(memory_source(config(aux_loss=0.02).encode(), "config.toml"))
    assert found.number("model.moe.aux_loss") == 0.02
    assert found.get("model.moe.nothing") is None and found.get("a.b.c") is None
    assert found.number("modules.router.dtype") is None


def test_events_carry_rank_time_and_the_last_spans() -> None:
    log = run_events.read(memory_source(EVENTS + b'{"span":"backw', "rank_3.jsonl"))
    assert log.ranks == [3] and log.events[0].fields["host"] == "n1" and log.events[0].line == 1
    assert log.spans["forward"].count == 2 and log.spans["forward"].longest.step == 2
    assert (log.last_time, log.last_step) == (103.5, 2)
    assert (log.problem, log.problem_severity) == ("line 4 is cut off", "info")
    assert run_events.read(memory_source(EVENTS, "events.jsonl")).ranks == []


def test_spans_and_module_times_are_added_up_by_step() -> None:
    lines = [b'{"event":"start","time":1.0,"rank":0}']
    for step in range(1, 5001):
        lines += [b'{"span":"forward","step":%d,"start":1.0,"seconds":0.25}' % step] * 2
    lines += [b'{"times":{"attention":0.5,"experts":0.1},"step":5}', b'{"times":{"attention":0.7},"step":10}']
    log = run_events.read(memory_source(b"\n".join(lines) + b"\n", "rank_0.jsonl"))
    forward = log.phases["forward"]
    assert len(forward.bins) <= MAX_BINS and sum(steps for _, steps in forward.bins.values()) == 5000
    assert all(seconds / steps == pytest.approx(0.5) for seconds, steps in forward.bins.values())
    assert log.modules["attention"].bins == {5: [0.5, 1], 10: [0.7, 1]} and log.problem is None


def test_steps_that_were_done_again_count_once() -> None:
    span = '{"span":"data","step":%d,"start":1.0,"seconds":%f}'
    lines = [span % (s, 1.0) for s in range(1, 11)] + ['{"event":"resume","time":1.0,"step":5}']
    lines += [span % (s, 2.0) for s in range(6, 11)]
    log = run_events.read(memory_source("\n".join(lines).encode(), "rank_0.jsonl"))
    assert [v[0] for v in log.phases["data"].bins.values()] == [1.0] * 5 + [2.0] * 5
