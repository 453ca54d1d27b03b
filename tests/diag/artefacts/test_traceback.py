"""Python tracebacks as consoles carry them."""

from __future__ import annotations

from diag.artefacts import log as log_reader
from diag.artefacts import memory_source
from diag.artefacts.log_facts import Log
from diag.artefacts.traceback import user_frame


def read(text: str) -> Log:
    log = log_reader.read(memory_source(text.encode(), "x.log"))
    assert isinstance(log, Log)
    return log


def test_type_message_and_the_innermost_frame_of_the_user():
    log = read('Traceback (most recent call last):\n  File "/w/train.py", line 12, in <module>\n    main()\n'
               '  File "/w/model.py", line 7, in forward\n    return f(x)\n           ^^^^\n'
               '  File "/opt/env/lib/python3.10/site-packages/torch/nn/functional.py", line 99, in linear\n'
                '    return _C(x)\n'
               "RuntimeError: mat1 and mat2\n")
    (tb,) = log.tracebacks
    assert (tb.type, tb.message, tb.line) == ("RuntimeError", "mat1 and mat2", 9)
    frame = user_frame(tb)
    assert frame is not None
    assert (frame.file, frame.line, frame.code) == ("/w/model.py", 7, "return f(x)")


def test_two_ranks_interleaved_line_by_line():
    a = ['Traceback (most recent call last):', '  File "/w/a.py", line 1, in f', "    x()", "KeyError: 'a'"]
    b = ['Traceback (most recent call last):', '  File "/w/b.py", line 2, in g', "    y()", "ValueError: b"]
    text = "".join(f"[rank0]: {x}\n[rank1]: {y}\n" for x, y in zip(a, b, strict=True))
    found = {(tb.speaker.rank, tb.type, tb.frames[0].file) for tb in read(text).tracebacks}
    assert found == {(0, "KeyError", "/w/a.py"), (1, "ValueError", "/w/b.py")}


def test_a_start_glued_to_a_progress_bar():
    log = read('Map:  47%|███| 3/6 [30:11<38:27,  1.5 examples/s]Traceback (most recent call last):\n'
               '  File "/w/a.py", line 1, in f\n    x()\nKeyError: 3\n')
    assert [tb.type for tb in log.tracebacks] == ["KeyError"]


def test_the_first_of_a_chain_is_the_origin():
    log = read('Traceback (most recent call last):\n  File "/w/a.py", line 1, in f\n    x()\nKeyError: 3\n\n'
               "During handling of the above exception, another exception occurred:\n\n"
               'Traceback (most recent call last):\n  File "/w/a.py", line 3, in f\n    raise Boom\nboom.Boom: no\n')
    (tb,) = log.tracebacks
    assert tb.type == "boom.Boom"
    assert tb.origin.type == "KeyError"


def test_lines_that_quote_code_are_no_messages():
    log = read('Traceback (most recent call last):\n  File "/w/a.py", line 1, in f\n'
               '    print("uncorrectable ECC error encountered")\nKeyError: 3\n')
    assert [e.quoted for e in log.events if e.rule == "cuda-ecc"] == [True]


def test_the_message_of_several_lines():
    log = read('[rank0]: Traceback (most recent call last):\n'
               '[rank0]:   File "/w/a.py", line 1, in f\n[rank0]:     x()\n'
               "[rank0]: RuntimeError: Error(s) in loading state_dict for M:\n[rank0]: \tsize mismatch for a\n"
               "[rank1]: something else\n[rank0]: \tsize mismatch for b\n\nother text\n")
    (tb,) = log.tracebacks
    assert tb.message == "Error(s) in loading state_dict for M:\nsize mismatch for a\nsize mismatch for b"
    assert tb.end_line == 7


def test_a_traceback_across_blocks_is_whole(monkeypatch):
    from diag.artefacts import log_scan

    text = "x" * 990 + '\nTraceback (most recent call last):\n' + "".join(
        f'  File "/w/f{n}.py", line {n}, in f\n    call_{n}()\n' for n in range(1, 30)) + "KeyError: 3\n"
    monkeypatch.setattr(log_scan, "BLOCK", 1024)
    monkeypatch.setattr(log_scan.blocks, "__defaults__", (None, 1024, None))
    (tb,) = read(text).tracebacks
    assert (tb.type, tb.line) == ("KeyError", 61)


def test_a_cut_traceback_makes_nothing_up():
    assert read('Traceback (most recent call last):\n  File "/w/a.py", line 1, in f\n    x()\n').tracebacks == []


def test_spawned_processes_are_numbered():
    log = read('-- Process 2 terminated with the following error:\nTraceback (most recent call last):\n'
               '  File "/w/a.py", line 1, in f\n    x()\nKeyError: 3\n')
    assert log.tracebacks[0].process == 2
