"""A real run whose corpus holds garbage in the documents of two steps: the spike and those documents are named."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from diag.diagnose import diagnose

pytest.importorskip("torch", reason="the extra 'train' is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
STEPS, FIRST, LAST = 150, 131, 132
DEADLINE = 250
WORDS = ["the", "rank", "waits", "for", "all", "others", "and", "then", "sends", "its", "part", "of", "a", "gradient"]
CODE = """
import sys, msgspec
from pathlib import Path
from pdtrain.trainer import train
from tests.diag.real.test_suspect_documents import settings
train(settings(sys.argv[2]), Path(sys.argv[1]))
"""


def settings(corpus):
    import msgspec

    from tests.diag.real.faulty_run import settings

    run = settings("none", STEPS, 1)
    return msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, path=str(corpus), val_share=0.01),
                                   recorder=msgspec.structs.replace(run.recorder, tensorboard=False))


def records_of(corpus: Path) -> set[int]:
    from pdtrain.data import open_data

    data = open_data(settings(corpus))
    return {span.record for step in range(FIRST, LAST + 1)
            for sequence in data.documents_of_step(step, 8) for span in sequence}


def written(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_the_documents_of_the_batch_that_the_loss_jumped_on_are_named(tmp_path: Path) -> None:
    draw, corpus, run = random.Random(7), tmp_path / "corpus.jsonl", tmp_path / "run"
    texts = [" ".join(draw.choices(WORDS, k=24)) for _ in range(2600)]
    written(corpus, texts)
    for record in (planted := records_of(corpus)):
        texts[record - 1] = "".join(draw.choices("QZXJ#@%&~^0123456789", k=len(texts[record - 1])))
    written(corpus, texts)
    assert records_of(corpus) == planted and len(planted) < 60
    subprocess.run([sys.executable, "-c", CODE, str(run), str(corpus)], cwd=ROOT, check=True, timeout=DEADLINE,
                   capture_output=True)
    found = [f for f in diagnose([run]).findings if f.cause == "loss_spike"]
    assert [f.where.step for f in found] == [FIRST] and found[0].severity == "warning", found
    named = found[0].numbers["suspect_documents"]
    assert {int(name.rsplit(":", 1)[1]) for name in named} <= planted and len(named) > 4
    assert found[0].numbers["suspect_samples"] == [(FIRST - 1) * 8, FIRST * 8 - 1]
    assert named[0] in found[0].fix[0]
    # without the event the sequences are known still, and a command that names their documents is given and works
    events = run / "events" / "rank_0.jsonl"
    events.write_text("".join(line for line in events.read_text().splitlines(keepends=True) if '"spike"' not in line))
    spike = next(f for f in diagnose([run]).findings if f.cause == "loss_spike")
    command = shlex.split(spike.fix[0].partition(": python ")[2])
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert all(name in done.stdout for name in named)
