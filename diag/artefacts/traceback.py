"""Python tracebacks as console logs carry them: prefixed, interleaved, chained, nested in a parent's report.

The printed format is that of CPython's `traceback` module (3.8 to 3.14, with ^^^^ markers and exception notes), of
`torch.multiprocessing.spawn` ("-- Process 3 terminated ..."), of torchrun's summary block (everything indented) and of
rich's boxes, where only the last line is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from diag.artefacts.log_facts import Frame, Speaker, Traceback

START = "Traceback (most recent call last):"
#: A traceback longer than this is cut: recursion errors fold their frames, so longer ones are damaged.
MAX_LINES = 400
MAX_MESSAGE_LINES = 14
#: A log that begins in the middle of a traceback shows a frame within so many lines.
BEHEADED = 6

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in\b ?(?P<function>.*))?$')
_TYPE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:\([\w.]+\))?)(?::(?: (?P<message>.*)|$)|$)")
_SUFFIXES = ("Error", "Exception", "Interrupt", "Exit", "Warning", "Iteration", "Timeout", "Failure", "Failed", "Abort",
             "Killed", "Group", "Stop", "Unavailable", "NotFound", "Error)", "Exception)")
_CODE = re.compile(r"[()=\[\]{}]|^(?:return|raise|self|for|with|import|from)\b")
_CHAIN = ("The above exception was the direct cause of the following exception:",
          "During handling of the above exception, another exception occurred:")
_PROCESS = re.compile(r"-- Process (\d+) terminated with the following error")
_FOREIGN = re.compile(r"^\s*(?:\[rank ?\d+\]|\[[A-Za-z_]\w*?\d+\]:|\([\w.]+ pid=|[\w.-]+:\d+:\d+ \[|\[?[EWIF]\d{3,4} |"
                      r"\[?\d{4}-\d\d-\d\d[ T]|\[\d\d/\d\d/\d|WARNING:|ERROR:|INFO:|={20}|-{20}|srun: |slurmstepd: |"
                      r"terminate called|Exception raised from|frame #\d)")

_LIBRARY = re.compile(r"site-packages|dist-packages|/lib(?:64)?/python[\d.]+/|^<|/torch/|\bray/_private")
#: Ray prints the frames of the task below its own exception, without a heading: "RayTaskError(KeyError): ray::main()".
_CARRIER = re.compile(r"\bRayTaskError\(\w+\)$")
#: Type names that only report what happened to another process or rank.
WRAPPERS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError",
            "RayTaskError", "SignalException", "SystemExit")


class TextLine:
    """One line of the window a traceback is read from."""

    __slots__ = ("number", "offset", "text")

    def __init__(self, number: int, offset: int, text: str) -> None:
        self.number, self.offset, self.text = number, offset, text


def short_type(name: str) -> str:
    """The class name without its modules: "torch.cuda.OutOfMemoryError" -> "OutOfMemoryError"."""
    return name.split("(")[0].rsplit(".", 1)[-1]


def looks_like_exception(name: str) -> bool:
    """Whether `name` can be the type that ends a traceback."""
    short = short_type(name)
    return name.endswith(_SUFFIXES) or short.endswith(_SUFFIXES) or ("." in name and short[:1].isupper())


def exception_line(text: str) -> tuple[str, str] | None:
    """(type, message) when `text` is the last line of a traceback."""
    found = _TYPE.match(text)
    if found is None or not looks_like_exception(found["type"]):
        return None
    return found["type"], found["message"] or ""


def parse(lines: Sequence[TextLine], start: int, speaker: Speaker, base: str | None = None,
          ) -> tuple[Traceback | None, set[int]]:
    """The traceback whose first line is `lines[start]`; and the numbers of lines that only quote source code.

    Lines of other writers between its lines are passed over. None when no exception line follows. `base` is what
    stands before each line, where that is known.
    """
    base = _base(lines, start, lines[start].text) if base is None else base
    frames: list[Frame] = []
    quoted: set[int] = set()
    flat = False  # a forum or a chat has eaten the indentation: a line of code follows each frame all the same
    index = start + 1
    while index < min(len(lines), start + MAX_LINES):
        line = lines[index]
        content = _content(line.text, base)
        index += 1
        if content is None or not content.strip():
            continue
        stripped = content.strip()
        if START in content:
            if not frames:
                continue  # another writer began at the same moment
            break
        if frame := _FRAME.search(stripped):
            name = (frame["function"] or "").strip()
            flat = content.startswith("File")
            frames.append(Frame(file=frame["file"], line=int(frame["line"]), function=name))
            quoted.add(line.number)
            continue
        if content[:1] in (" ", "\t", "│", "|"):
            quoted.add(line.number)
            if frames and not frames[-1].code and not set(stripped) <= set("^~ "):
                frames[-1].code = stripped[:300]
            continue
        found = exception_line(stripped)
        if flat and frames and not frames[-1].code:
            frames[-1].code = stripped[:300]
            quoted.add(line.number)
            continue
        if found is None:
            if frames and _could_be_torn(stripped):
                continue
            if frames:
                break
            continue
        bare = stripped == found[0]
        message, last = ("", line.number) if bare else _message(lines, index, base, found[1], quoted)
        result = Traceback(type=found[0], message=message, line=line.number, end_line=last, offset=line.offset,
                           text=stripped[:2000], speaker=speaker, frames=frames, process=_process(lines, start))
        if _CARRIER.search(found[0]):
            inner, code = parse(lines, index - 1, speaker, base)
            if inner is not None and inner.frames:
                result.cause = inner
                quoted |= code
        return result, quoted
    return None, quoted


def beheaded(lines: Sequence[TextLine], speaker: Speaker) -> tuple[Traceback | None, set[int]]:
    """The traceback in whose frames `lines` begin: the end of a longer log, or what somebody pasted of it."""
    for index, line in enumerate(lines[:BEHEADED]):
        if START in line.text:
            break
        if (at := line.text.find('File "')) >= 0 and _FRAME.search(line.text.rstrip()):
            return parse([TextLine(0, 0, ""), *lines[index:]], 0, speaker, line.text[:at].removesuffix("  "))
    return None, set()


def chained(lines: Sequence[TextLine], after: int) -> bool:
    """Whether the traceback that ends on line number `after` is said to have led to the next one."""
    first = next((i for i, line in enumerate(lines) if line.number > after), len(lines))
    return any(sentence in line.text for line in lines[first : first + 6] for sentence in _CHAIN)


def user_frame(traceback: Traceback) -> Frame | None:
    """The innermost frame in the user's own code; the innermost of all when every frame is in a library."""
    for frame in reversed(traceback.frames):
        if not _LIBRARY.search(frame.file):
            return frame
    return traceback.frames[-1] if traceback.frames else None


def _base(lines: Sequence[TextLine], start: int, head: str) -> str:
    """What stands before each line of this traceback: a rank mark, a time stamp, blanks."""
    prefix = head[: head.find(START)]
    if prefix.strip() and any(line.text.startswith(prefix) for line in lines[start + 1 : start + 24]):
        return prefix
    for line in lines[start + 1 : start + 4]:
        at = line.text.find('File "')
        if at >= 0:
            base = line.text[:at]
            level = re.sub(r"\d", "0", base) == re.sub(r"\d", "0", prefix)  # a forum has eaten the indentation
            return base if level else base.removesuffix("  ")
    return prefix


def _content(text: str, base: str) -> str | None:
    """`text` after `base`, or None when another writer printed it. Digits in `base` (times) may differ."""
    if not base.strip():
        if text.startswith(base):
            rest = text[len(base):]
            return None if _FOREIGN.match(rest) else rest
        return None if _FOREIGN.match(text) else text
    front = text[: len(base)]
    if front == base:
        return text[len(base):]
    if re.search(r"\d\d:\d\d", base) and re.sub(r"\d", "0", front) == re.sub(r"\d", "0", base):
        return text[len(base):]
    if front.rstrip() == base.rstrip():
        return ""
    return None


def _message(lines: Sequence[TextLine], index: int, base: str, first: str, quoted: set[int]) -> tuple[str, int]:
    """The whole message of an exception (it may have several lines) and the number of its last line."""
    parts, last = [first], lines[index - 1].number
    for line in lines[index : index + MAX_MESSAGE_LINES]:
        content = _content(line.text, base)
        if content is None:
            if base.strip():
                continue
            break
        stripped = content.strip()
        if not stripped:
            if parts == [""]:
                continue
            break
        if START in content or any(s in content for s in _CHAIN) or _FRAME.search(stripped) or _PROCESS.search(content):
            break
        if exception_line(stripped) and len(parts) > 1:
            break
        parts.append(stripped)
        last = line.number
    return "\n".join(part for part in parts if part)[:4000], last


def _process(lines: Sequence[TextLine], start: int) -> int | None:
    for line in lines[max(0, start - 3) : start]:
        if found := _PROCESS.search(line.text):
            return int(found[1])
    return None


def _could_be_torn(text: str) -> bool:
    """A piece of a source line that lost its indentation when two ranks wrote at once."""
    return bool(_CODE.search(text)) and not text[:1].isupper()
