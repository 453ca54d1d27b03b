"""What docs/signatures.md promises to somebody who writes signatures of his own, tried through the command line."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from diag.signatures import Signature
from tests.diag.helpers import pdtrain

PAGE = (Path(__file__).parents[3] / "docs" / "signatures.md").read_text()
EXAMPLE = re.search(r"<!-- example -->\n```yaml\n(.*?)```", PAGE, re.S)[1]  # type: ignore[index]
STEPS = "".join(f"step {n} | loss {3 - n / 100:.4f}\n" for n in range(10, 40))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def report(folder: Path, text: str, signatures: str = EXAMPLE) -> dict:
    """The report of a log that ends in `text`, with `signatures` as the user's only file."""
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "ours.yaml").write_text(signatures, encoding="utf-8")
    (folder / "job.log").write_text(STEPS + text + "\n", encoding="utf-8")
    return pdtrain("diag", "postmortem", folder / "job.log", "--signatures", folder / "mine", "--json").json()


def entry(pattern: str, line: str, **keys: str) -> str:
    """One signature of cause code_error, as YAML."""
    given = {"role": "initiating", "cause": "code_error", "says": "it broke"} | keys
    rows = "".join(f"  {key}: {value}\n" for key, value in given.items())
    return f"- id: mine\n{rows}  source: here\n  pattern: '{pattern}'\n  match: ['{line}']\n  near_miss: ['a', 'b']\n"


def test_the_page_names_every_key() -> None:
    assert all(f"`{name}`" in PAGE for name in (field.name for field in msgspec.structs.fields(Signature)))


def test_the_example_blames_the_host_that_the_line_names(tmp_path: Path) -> None:
    done = report(tmp_path, "rackd: PSU alarm rack=r12 host=node-7")
    root = done["findings"][0]
    assert (done["verdict"], done["headline"]) == ("failed", "Rack r12 lost a power supply feeding node-7")
    assert (root["cause"], root["where"]["hosts"], root["confidence"]) == ("node_failure", ["node-7"], 0.9)
    assert root["numbers"]["signatures"] == ["rack-power"]
    assert f"    FAILED  {done['headline']}\n" in PAGE


def test_a_missing_group_leaves_its_words_out(tmp_path: Path) -> None:
    assert report(tmp_path, "rackd: PSU alarm rack=r12")["headline"] == "Rack r12 lost a power supply"


def test_none_keeps_a_line_out(tmp_path: Path) -> None:
    assert report(tmp_path, "rackd: PSU alarm rack=r12 cleared")["verdict"] == "healthy"


@pytest.mark.parametrize("end, verdict", [("retried", "healthy"), ("giving up", "unknown")])
def test_noise_is_no_suspicion(tmp_path: Path, end: str, verdict: str) -> None:
    assert report(tmp_path, f"blobd: ERROR: lease lost, {end}")["verdict"] == verdict


def test_noise_silences_less_certain_signatures_in_its_line(tmp_path: Path) -> None:
    shouts = entry("ERROR: lease lost", "ERROR: lease lost")
    assert report(tmp_path, "blobd: ERROR: lease lost, retried", EXAMPLE + shouts)["verdict"] == "healthy"
    certain = entry("ERROR: lease lost", "ERROR: lease lost", sure="0.95")
    assert report(tmp_path, "blobd: ERROR: lease lost, retried", EXAMPLE + certain)["verdict"] == "failed"


def test_a_victim_is_folded_under_a_cause_and_leads_timidly_without_one(tmp_path: Path) -> None:
    victim = entry("agentd: peer left", "agentd: peer left", role="victim", cause="store_lost", sure="0.4")
    alone = report(tmp_path, "agentd: peer left", EXAMPLE + victim)["findings"][0]
    assert (alone["cause"], alone["role"]) == ("store_lost", "root") and alone["confidence"] <= 0.4
    both = report(tmp_path, "rackd: PSU alarm rack=r1\nagentd: peer left", EXAMPLE + victim)["findings"]
    assert [(f["cause"], f["role"]) for f in both] == [("node_failure", "root"), ("store_lost", "victim")]


def test_a_confirming_line_says_nothing_alone_and_raises_confidence(tmp_path: Path) -> None:
    confirming = entry("rackd: breaker open", "rackd: breaker open", role="confirming", cause="node_failure")
    assert report(tmp_path, "rackd: breaker open", EXAMPLE + confirming)["verdict"] == "healthy"
    found = report(tmp_path, "rackd: PSU alarm rack=r1\nrackd: breaker open", EXAMPLE + confirming)["findings"]
    assert found[0]["confidence"] > 0.9 and len(found) == 1


def test_trial_caps_the_confidence(tmp_path: Path) -> None:
    found = report(tmp_path, "frob broke", entry("frob broke", "frob broke", sure="0.95", trial="true"))
    assert found["findings"][0]["confidence"] == 0.6


@pytest.mark.parametrize("prefix, ranks", [("[rank3]: ", [3]), ("", [])])
def test_the_rank_is_that_of_the_line(tmp_path: Path, prefix: str, ranks: list[int]) -> None:
    found = report(tmp_path, f"{prefix}frob broke", entry("frob broke", "frob broke", blames="rank"))
    assert found["findings"][0]["where"].get("ranks", []) == ranks


def test_names_with_digits_are_one_name_and_ranks_can_be_captured(tmp_path: Path) -> None:
    mine = entry(r"frob (?:broke on (?P<rank>\d+)|(?P<rank2>\d+) is out)", "frob broke on 7", blames="rank",
                 says="frob is out on {rank}")
    done = report(tmp_path, "frob 5 is out", mine)
    assert "frob is out on 5" in done["headline"].lower() and done["findings"][0]["where"]["ranks"] == [5]


@pytest.mark.parametrize("engine", ["hyperscan", "re"])
@pytest.mark.parametrize("pattern, line", [
    (r"frob (?!ok)(\w)\1", "frob xx"),  # look-around and a back-reference
    (r"Größe (?P<what>\d+) 训练", "Größe 7 训练"),  # any script, as literal text
    (r"\d\d:\w\w", "12:ab"),  # no literal to look for: searched for by re, in the whole text
])
def test_any_python_expression_works_with_either_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, pattern: str, line: str
) -> None:
    if engine == "hyperscan":
        pytest.importorskip("hyperscan")
    monkeypatch.setenv("PDTRAIN_SIGNATURE_ENGINE", engine)
    assert report(tmp_path, f"[rank1]: \x1b[31m{line}\x1b[0m", entry(pattern, line))["verdict"] == "failed"


def test_anchors_must_stand_in_every_match(tmp_path: Path) -> None:
    for anchors, verdict in (("[frob]", "failed"), ("[elsewhere]", "healthy")):
        assert report(tmp_path, "frob broke", entry("frob broke", "frob broke", anchors=anchors))["verdict"] == verdict


def test_a_changed_file_is_compiled_again(tmp_path: Path) -> None:
    assert report(tmp_path, "frob broke", entry("frob broke", "frob broke"))["verdict"] == "failed"
    assert report(tmp_path, "frob broke", entry("frob sang", "frob sang"))["verdict"] == "healthy"


def test_a_mistake_is_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(STEPS)
    (tmp_path / "power.yaml").write_text(EXAMPLE.replace("node_failure", "node_failur"))
    done = pdtrain("diag", "postmortem", tmp_path / "job.log", "--signatures", tmp_path)
    words = done.err.replace(str(tmp_path), "our-signatures").strip()
    assert done.status == 2 and f"    {words}\n" in PAGE
