"""Progress lines that follow no common pattern: llm.c's main.log, "loss at 200 3.1", evaluations of nanoGPT."""

from __future__ import annotations

import re

from diag.artefacts.log_facts import Progress
from diag.artefacts.log_lines import Style, front_speaker

_N = r"[-+]?(?:nan|inf|\d{1,24}\.?\d{0,24}(?:[eE][-+]?\d{1,5})?)"
_LLMC = re.compile(rf"^s:(\d{{1,15}}) (?:(trl|tel|eval):({_N}))?(?: ?lr:({_N}))?(?: norm:({_N}))?", re.I)
_AT = re.compile(r"^\W{0,8}(?:train(?:ing)? )?loss at (?:step |iter(?:ation)? )?(\d{1,15})\W{1,8}"
                 rf"({_N})\s{{0,8}}$", re.I)
#: "1200 | loss 3.1234 | lr 5.0e-04 | 210.51ms | mfu 12.00%" of llama2.c and its descendants.
_LLAMA2C = re.compile(rf"^\s{{0,8}}(\d{{1,15}}) \| loss ({_N}) \| lr ({_N}) \|", re.I)
_EVALUATION = re.compile(rf"\bstep (\d{{1,15}}): train loss ({_N}), val loss ({_N})")
_AT_STEP = re.compile(rf"\b(?:eval|val(?:idation)?) loss at (?:step|iteration) (\d{{1,15}}): ({_N})", re.I)
#: Lines that tell only how long a step took.
_TOOK = re.compile(rf"\b(?:iter(?:ation)?|step)(?: #?(\d{{1,15}}))? took:? ({_N}) ?(s|sec|secs|seconds|ms)\b", re.I)


def parse_special(text: str, style: Style) -> Progress | None:
    """The progress of one of these lines, or None. Evaluations are kind "summary": they are no training step."""
    if text.startswith("s:") and (m := _LLMC.match(text)):
        values = {key: float(m[i]) for key, i in (("lr", 4), ("grad_norm", 5)) if m[i]}
        if m[2]:
            values[{"trl": "loss", "tel": "val_loss"}.get(m[2].lower(), "eval_score")] = float(m[3])
        trained = (m[2] or "trl").lower() == "trl"
        return _made(text, int(m[1]), values, "llmc" if trained else "summary llmc", style) if values else None
    if " took" in text and "oss" not in text and (m := _TOOK.search(text)):
        return _made(text, int(m[1]) if m[1] else -1, {"iter_time": float(m[2]) * (1e-3 if m[3] == "ms" else 1.0)},
                     "took", style)
    if "loss" not in text and "Loss" not in text:
        return None
    if " | loss " in text and (m := _LLAMA2C.match(text)):
        return _made(text, int(m[1]), {"loss": float(m[2]), "lr": float(m[3])}, "step", style)
    if m := _AT.match(text):
        return _made(text, int(m[1]), {"loss": float(m[2])}, "at", style)
    if ", val loss" in text and (m := _EVALUATION.search(text)):
        values = {"eval_train_loss": float(m[2]), "val_loss": float(m[3])}
        return _made(text, int(m[1]), values, "summary", style)
    if " loss at " in text.lower() and (m := _AT_STEP.search(text)):
        return _made(text, int(m[1]), {"val_loss": float(m[2])}, "summary", style)
    return None


def _made(text: str, step: int, values: dict[str, float], kind: str, style: Style) -> Progress:
    return Progress(step=step, line=0, offset=0, text=text[:400], speaker=front_speaker(text, style), values=values,
                    kind=kind)
