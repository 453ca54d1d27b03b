"""What a signature is: one kind of log line that means something, as data with its own examples.

    - id: ib-retry-exceeded            unique, kebab case; shown by `--json` and in docs/signatures.md
      cause: ib_link_error             slug of diag.causes; absent for facts and noise
      role: initiating                 see `Role`
      severity: error
      says: InfiniBand retries were exceeded towards {peer}
      pattern: '...'                   a regular expression on one line; named groups become facts
      all: ['...']                     further expressions that must be found in the same line
      none: ['...']                    expressions that must not be found in the same line
      anchors: ['...']                 literals one of which every match contains; derived from `pattern` when absent,
                                       given where the derived ones ("loss", "time") occur in every other line
      blames: host                     who is guilty when only this line speaks; see `Blame`
      sure: 0.9                        how often it names the root when nothing else speaks, measured on cases
      frameworks: [nccl]               where the wording comes from
      versions: '2.x'
      source: NCCL net_ib, both wordings
      match: ['...']                   at least one real line that must match
      near_miss: ['...', '...']        at least two lines that look alike and must not
      fix: ['...']                     what to do, where the playbook of the cause would mislead (other vendors)
      trial: true                      not proven by a case or a drill yet: confidence is capped

Names in `says` in braces are the groups; a missing group leaves its words out.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

#: initiating  something broke here: may lead a report
#: victim      what others see of a break elsewhere: leads only when nothing better is known
#: confirming  makes a suspicion certain, says nothing alone
#: context     worth showing beside a verdict (a warning, a work-around, a notice)
#: noise       looks like an error and is none; keeps the line from counting as suspicious
#: fact        input of a parser (identity, watchdog, launcher, progress); no finding of its own
Role = Literal["initiating", "victim", "confirming", "context", "noise", "fact"]

#: rank: the rank that printed it, or the group `rank`; host: likewise; gpu; job: nobody in particular;
#: reporter: host and rank of the line are shown, but it may speak of somebody else
Blame = Literal["rank", "host", "gpu", "job", "reporter"]

Severity = Literal["fatal", "error", "warning", "info"]

#: A signature that no case or drill has proven claims no more than this.
TRIAL_CAP = 0.6

Text = Annotated[str, msgspec.Meta(min_length=1)]
Slug = Annotated[str, msgspec.Meta(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")]


class Signature(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One row of a signature file. See the module docstring."""

    id: Slug
    pattern: Text
    role: Role
    source: Text
    match: Annotated[list[Text], msgspec.Meta(min_length=1)]
    near_miss: Annotated[list[Text], msgspec.Meta(min_length=2)]
    cause: str | None = None
    severity: Severity = "error"
    says: str = ""
    all: list[Text] = []
    none: list[Text] = []
    anchors: list[Annotated[str, msgspec.Meta(min_length=3)]] = []
    blames: Blame = "reporter"
    sure: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.8
    frameworks: list[Text] = []
    versions: str = ""
    fix: list[Text] = []
    trial: bool = False


class Rule(msgspec.Struct, kw_only=True, frozen=True):
    """What the scanner needs of a signature; the examples stay in the YAML. Stored in the cache."""

    id: str
    pattern: str
    role: Role
    cause: str | None
    severity: Severity
    says: str
    all: list[str]
    none: list[str]
    blames: Blame
    sure: float
    #: literals one of which every match contains; empty when none could be derived: then it is searched for by `re`
    literals: list[str]
    caseless: bool = False
    fix: list[str] = []
