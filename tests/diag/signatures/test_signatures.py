"""Every signature's own examples, the strict loader, both engines, the cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from diag.causes import CAUSES
from diag.errors import UsageError
from diag.signatures import all_signatures, load_catalogue
from diag.signatures.literals import required_literals
from diag.signatures.loader import format_says, load, to_rule, verify
from diag.signatures.matcher import HyperscanMatcher, ReMatcher
from tests.diag.incident_files import incidents

SIGNATURES = all_signatures()
ROOT = Path(__file__).parents[3]

GOOD = """
- id: mine-power
  cause: gpu_hw_fault
  role: initiating
  says: the power supply of {rack} failed
  source: our own monitoring
  pattern: 'PSU alarm rack=(?P<rack>\\w+)'
  match: ['PSU alarm rack=r12']
  near_miss: ['PSU alarm cleared', 'rack=r12']
"""


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.id)
def test_a_signature_matches_its_examples_and_not_its_near_misses(signature):
    rule = to_rule(signature)
    assert [line for line in signature.match if verify(rule, line.encode()) is None] == []
    assert [line for line in signature.near_miss if verify(rule, line.encode()) is not None] == []


def test_every_signature_has_a_literal_to_search_for():
    assert [s.id for s in SIGNATURES if not to_rule(s).literals] == []


def test_the_engines_propose_the_same_verified_lines():
    """Over all examples and incidents in one text, in random order: where the engines differ, results would."""
    lines = [line for s in SIGNATURES for line in (*s.match, *s.near_miss)]
    lines += [line for incident in incidents() for line in incident.lines]
    random.Random(7).shuffle(lines)
    text = "\n".join(lines).encode() + b"\n"
    rules = [to_rule(s) for s in SIGNATURES]
    assert set(HyperscanMatcher(rules).propose(text)) == set(ReMatcher(rules).propose(text))


def test_a_line_is_found_whatever_stands_before_it():
    """Compiled from whole expressions, hyperscan missed the desync line behind a watchdog line."""
    text = (b"[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE\n"
            b"\t - [6] finished collective #87, but didn't join collective #88 (count from 1)\n")
    catalogue = load_catalogue(engine="hyperscan", cache=False)
    found = {catalogue.rules[i].id for end, i in catalogue.matcher.propose(text)
             if verify(catalogue.rules[i], text[text.rfind(b"\n", 0, end - 1) + 1 :].split(b"\n")[0])}
    assert "desync-report" in found


def test_the_cache_gives_the_same_catalogue(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = load_catalogue()
    stored = list((tmp_path / "pdtrain").glob("signatures-*.bin"))
    again = load_catalogue()
    assert len(stored) == 1
    assert again.rules == first.rules
    assert again.matcher.propose(b"CUDA out of memory\n") == first.matcher.propose(b"CUDA out of memory\n")


@pytest.mark.parametrize("damage", [b"", b"rubbish", None])
def test_a_damaged_cache_is_made_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_catalogue()
    store = next((tmp_path / "pdtrain").glob("signatures-*.bin"))
    data = store.read_bytes()
    store.write_bytes(data[:-40] if damage is None else damage)
    assert load_catalogue().by_id["cuda-oom"].cause == "cuda_oom"


def test_a_users_signatures_are_used_beside_the_built_in_ones(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    catalogue = load_catalogue(tmp_path, cache=False)
    assert {"mine-power", "cuda-oom"} <= catalogue.by_id.keys()


@pytest.mark.parametrize("change, words", [
    (("says:", "sayz:"), "mine.yaml: signature 'mine-power': Object contains unknown field `sayz`"),
    (("gpu_hw_fault", "gpu_hw_falt"), "did you mean 'gpu_hw_fault'?"),
    (("(?P<rack>", "(?P<rack"), "pattern: not a regular expression"),
    (("role: initiating", "role: guilty"), "Invalid enum value 'guilty'"),
    (("near_miss: ['PSU alarm cleared', 'rack=r12']", "near_miss: ['one']"), "`array` of length >= 2"),
    (("id: mine-power", "id: cuda-oom"), "signature 'cuda-oom' exists already"),
    (("- id: mine-power", "mine:\n  id: mine-power"), "must be a list of signatures"),
    (("match: ['PSU", "match: ['PSU alarm rack=r12'"), "is not YAML"),
    (("'PSU alarm rack=(?P<rack>\\w+)'", "'x*'"), "matches everything"),
])
def test_a_mistake_names_file_entry_and_key(tmp_path, change, words):
    (tmp_path / "mine.yaml").write_text(GOOD.replace(*change))
    with pytest.raises(UsageError) as error:
        load_catalogue(tmp_path, cache=False)
    assert words in str(error.value)


def test_a_folder_without_signatures_is_a_mistake(tmp_path):
    with pytest.raises(UsageError, match="holds no signature files"):
        load_catalogue(tmp_path, cache=False)


def test_a_new_signature_claims_little_until_proven():
    trial = [s for s in SIGNATURES if s.trial]
    assert trial
    assert max(to_rule(s).sure for s in trial) <= 0.6


def test_every_public_cause_has_a_signature_or_code_that_finds_it():
    """Causes that only counting, numbers, checkpoints or dumps show are named in code."""
    code = "".join(path.read_text("utf-8") for path in ROOT.glob("diag/**/*.py") if path.name != "causes.py")
    public = {slug for slug, row in CAUSES.items() if row.verdict not in ("context", "healthy")}
    known = {s.cause for s in SIGNATURES}
    assert {slug for slug in public - known if f'"{slug}"' not in code} == set()


@pytest.mark.parametrize("pattern, literals", [
    (r"error (?:12|13)\b.*vendor err 129", ["vendor err 129"]),
    (r"(?:Killed process|oom-kill:) \d+", ["Killed process", "oom-kill:"]),
    (r"[Ss]tale file handle", ["Stale file handle", "stale file handle"]),
    (r"(?i)Loss is NaN", ["loss is nan"]),
    (r"(?:abc)?\d+", []),
    (r"a|bcdef", []),
])
def test_required_literals(pattern, literals):
    assert required_literals(pattern)[0] == literals


def test_missing_groups_leave_their_words_out():
    says = "retries exceeded[[ towards {peer}]]"
    assert format_says(says, {"peer": "10.0.0.9"}) == "retries exceeded towards 10.0.0.9"
    assert format_says(says, {"peer": None}) == "retries exceeded"


def test_a_signature_file_may_not_be_enormous(tmp_path):
    path = tmp_path / "big.yaml"
    path.write_text("# " + "x" * (5 << 20))
    with pytest.raises(UsageError, match="larger than 4 MiB"):
        load([Path(path)])
