"""The playbooks: one Markdown file per failure with YAML front matter, shipped as the package `playbooks`."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Annotated, Any

import msgspec

from diag.errors import UsageError
from diag.schema import Where


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One look: what a healthy and a sick answer look like, and where the line between them is.

    Either `command` (to be typed) or `look` (what no single command shows). Words in CAPITALS are the reader's own.
    """

    healthy: str
    sick: str
    command: str | None = None
    look: str | None = None
    threshold: str | None = None

    def __post_init__(self) -> None:
        if (self.command is None) == (self.look is None):
            raise ValueError("a step has either a command or a look")

    @property
    def words(self) -> str:
        """The command, or what to look at."""
        return self.command or self.look or ""


class Playbook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Symptom -> locate -> fix -> verify for one failure. `drill` says how to cause it, or why nobody can."""

    id: str
    title: str
    causes: Annotated[list[str], msgspec.Meta(min_length=1)]
    symptoms: Annotated[list[str], msgspec.Meta(min_length=1)]
    suspect: str
    locate: Annotated[list[Step], msgspec.Meta(min_length=1)]
    fix: Annotated[list[str], msgspec.Meta(min_length=1)]
    verify: Annotated[list[str], msgspec.Meta(min_length=1)]
    drill: str
    prose: str = ""


@cache
def playbooks() -> dict[str, Playbook]:
    """Every playbook by id, sorted. A malformed one is a bug of ours and raises `ValueError` with file and key."""
    pages = (parse(name, text) for name, text in _texts().items())
    return {page.id: page for page in sorted(pages, key=lambda page: page.id)}


def parse(name: str, text: str) -> Playbook:
    """The playbook in `text`; `name` is its file name, whose stem must be the id."""
    import yaml  # slow to import, and not needed for a healthy report

    _, front, prose = text.split("---\n", 2) if text.startswith("---\n") else ("", "", text)
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        # Our own pages; and the safe loader, in C where it is built, makes plain data only.
        fields = yaml.load(front, Loader=loader)  # noqa: S506 - both are safe loaders
        page = msgspec.convert({**(fields or {}), "prose": prose.strip()}, Playbook)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"playbooks/{name}: {error}") from error
    if f"{page.id}.md" != name:
        raise ValueError(f"playbooks/{name}: id is '{page.id}'")
    return page


@cache
def _texts() -> dict[str, str]:
    """File name -> text of every playbook."""
    return {item.name: item.read_text("utf-8") for item in resources.files("playbooks").iterdir()
            if item.name.endswith(".md")}


@cache
def _files() -> dict[str, str]:
    """Cause -> file name, from the one line that lists them: parsing 50 pages of YAML would take 0.1 s."""
    found = ((name, _CAUSES.search(text)) for name, text in _texts().items())
    return {cause.strip(): name for name, match in found if match for cause in match[1].split(",")}


_CAUSES = re.compile(r"^causes: \[(.*)\]$", re.M)


@cache
def for_cause(cause: str) -> Playbook | None:
    """The one playbook that treats `cause`, if it is written."""
    name = _files().get(cause)
    return parse(name, _texts()[name]) if name else None


def fill(text: str, where: Where | None = None) -> str:
    """`text` with {ranks} {hosts} {gpus} {step} {module} {group} {file} from `where`, or in general words."""
    for name, general in _PLACEHOLDERS.items():
        if f"{{{name}}}" in text:
            value = getattr(where, name, None)
            if isinstance(value, list):
                value = ", ".join(map(str, value[:8])) + (" …" if len(value) > 8 else "")
            text = text.replace(f"{{{name}}}", general if value in (None, "") else str(value))
    return text


_PLACEHOLDERS = {"ranks": "the rank", "hosts": "the host", "gpus": "the GPU", "step": "the onset step",
                 "module": "the module", "group": "the group", "file": "the file"}


def find(name: str) -> Playbook:
    """The playbook with this id, or the one that treats the cause of this name. Raises `UsageError`."""
    page = playbooks().get(name) or for_cause(name)
    if page is None:
        import difflib

        near = difflib.get_close_matches(name, [*playbooks(), *_files()], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see `pdtrain playbook list`"
        raise UsageError(f"no playbook and no cause is called '{name}'; {hint}")
    return page
