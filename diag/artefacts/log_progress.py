"""Progress lines: the step a run has reached, and the numbers it printed with it.

Formats known by their own layout: Megatron-LM and its forks ("iteration 17/ 500 | lm loss: ... |"), Hugging Face
Trainer dictionaries, OLMo and Composer blocks ("[step=3/2000" or "[batch=3/4800]:" and indented lines of one value),
tqdm bars, Keras bars, "Epoch: [4] [ 480/1251]" of the torchvision references, "Epoch(train) [4][480/1251]" of mmengine.
Everything else is read by the generic rule: a step counter and at least one metric (torchtitan, DeepSpeed, fairseq
JSON, litgpt, RETURNN, nanoGPT, home-made loops), or a loss beside any other counter.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from diag.artefacts.log_facts import Progress
from diag.artefacts.log_lines import Style, clean, front_speaker
from diag.artefacts.log_special import parse_special

# Every repetition has an end: a damaged line of thousands of spaces or digits must not cost more than a moment.
_NUMBER = r"[-+]?(?:nan|inf(?:inity)?|\d[\d,]{0,20}\.?\d{0,24}(?:e[-+]?\d{1,5})?|\.\d{1,24})"
_MEGATRON = re.compile(r"\biteration\s{1,12}(\d+)/\s{0,12}(\d+)\s{0,12}\|(.*)")
_PIPED = re.compile(r"([^|:]{1,80}): {0,12}([-+.\w]{1,40}) {0,12}(?=\||$)")
_DICT = re.compile(r"\{['\"][\w./ -]{1,80}['\"]: ")
_PAIR = re.compile(rf"['\"]([\w./ -]{{1,80}})['\"]: ['\"]?({_NUMBER})['\"]?(?=[,}}])", re.I)
_FIELD = re.compile(rf"([A-Za-z_][\w./() -]{{0,60}}?)\s{{0,8}}[:=]\s{{0,8}}({_NUMBER})(?![\w:])", re.I)
_COUNT = re.compile(r"['\"](?:iteration|step|global_step(?:/max_steps)?)['\"]: ['\"](\d+)/(\d+)['\"]")
_OLMO = re.compile(r"\[(?:step|batch)=(\d+)(?:/(\d+))?")
_OLMO_VALUE = re.compile(rf"(?:^|[|>)\]:Z])\s{{2,12}}(?:Train )?([\w./()-][\w./ ()-]{{0,60}}?)(?:=|: )({_NUMBER})"
                         r"\s{0,8}$", re.I)
_KERAS = re.compile(r"(?:^|[\s|>])(\d+)/(\d+) (?:\[[=>.]+\]|[\u2501\u2500]+)\s")
_TQDM = re.compile(r"(?P<desc>[^|\r]{0,80}?):?\s{1,8}\d{1,3}%\|.{0,400}?\|\s{0,12}(?P<n>\d+)/(?P<total>\d+) "
                   r"\[(?P<elapsed>[\d:]+)<[\d:?]+(?P<rest>[^\]]*)")
#: A bar without a total: "31step [01:09, 19.40s/step, loss=2.1]".
_UNBOUNDED = re.compile(r"(?:^|[\s:|])(?P<n>\d{1,12}) ?(?:it|steps?|batch(?:es)?|ba|ex(?:amples)?|samples?) "
                        r"\[(?P<elapsed>\d[\d:]+), {0,4}[?\d][\d.]{0,12} ?(?:\w{1,8}/s|s/\w{1,8}), ?(?P<rest>[^\]]*)")
#: The rest of a Megatron-LM line that a terminal or a wrapper has broken.
_BROKEN = re.compile(r"\s*(?:learning rate|global batch size|lm loss|loss scale|grad norm|params norm|num zeros|"
                     r"consumed samples|number of (?:skipped|nan) iterations): {0,12}[-+.\w]{1,40} {0,12}(?:\||$)")
_EPOCH = re.compile(r"Epoch(?:\(train\))?:?\s{0,4}\[(\d+)\]\s{0,4}\[\s{0,8}(\d+)/(\d+)\]")
_STEP = re.compile(r"(?:^|[\s\[(,|\"'{])(?:global[_ ]?step|train[_ ]?step|step|iter(?:ation)?|batch(?:_idx)?|"
                   r"num_updates|updates?|it)s?[\"'\]]?\s{0,8}[:=#\[( ]\s{0,12}[\"']?(\d+)"
                   r"(?:\s{0,4}/\s{0,12}(\d+))?", re.I)
#: Settings that are printed with the word: no counter.
_PLURAL = re.compile(r"steps[\"'\]]?\s{0,8}[:=#\[( ]", re.I)
_SETTING = re.compile(r"(?:accumulation|optimi[sz]ation|warm-?up|total|max|number of|num|save|saving|logging|eval\w*|"
                      r"decay|every|per|train\w*)[ _-]{0,3}$", re.I)
_STEPPED = re.compile(r"step|update", re.I)
_WORD = r"(?:loss|ce|ctc\w*|ppl|fer|nll|g(?:rad(?:ient)?[_-])?norm)"
_WORD_VALUE = re.compile(rf"\b((?:[\w.-]{{0,60}}[_.-])?{_WORD}\w{{0,40}})\]?\s{{1,8}}({_NUMBER})(?![\w.])", re.I)
#: "Loss is 1.31. Current learning rate is 0.046." (BigDL)
_IS_VALUE = re.compile(rf"\b(loss|learning rate)\s{{1,4}}is\s{{1,4}}({_NUMBER})(?=\.?(?:[\s,;]|$))", re.I)
_METER = re.compile(rf"\b(Time|Data(?: time)?)[:\s]\s{{0,8}}({_NUMBER})\s{{0,4}}\(")
#: A loss under any name, and a counter under any name: the last resort.
_ANY_LOSS = re.compile(rf"([\w./-]{{0,60}}loss)[\"'\])]?\s{{0,8}}[:= ]\s{{0,8}}[\"']?({_NUMBER})(?![\w:%])", re.I)
_TRAIN_LOSS = re.compile(rf"[^\w\n]{{0,12}}(?:avg[. _]{{1,2}})?train(?:ing)?[ _-]loss\s{{0,3}}[:=]\s{{0,4}}({_NUMBER})"
                         r"(?![\w:%])", re.I)
_ANY_COUNT = re.compile(r"(?<![\w./-])(\d+)\s?/\s?(\d+)(?![\w./-])|\b(?:epoch|ep|round|e)[\s:=#\[(]*(\d+)\b", re.I)
_OTHER_SPLIT = re.compile(r"\b(?:eval\w*|valid\w*|val|test\w*|best|mean|average|final|dev)\b", re.I)
_SPLIT_BEFORE = re.compile(r"\b(?:eval\w*|valid\w*|val|test\w*|dev)\W{0,4}$", re.I)
#: "Step 14100 stats, val: loss = 3.3": the loss of another split under the plain name.
_OTHER_LOSS = re.compile(r"\b(?:eval\w*|valid\w*|val|test\w*|dev)\s{0,3}[:\]|-]\s{0,3}loss\b", re.I)
_METRIC = re.compile(r"loss|\bce\b|ctc|ppl|perplexity|nll|grad|\blr\b|learning.rate|tok|samples|speed|time|it/s|sec",
                     re.I)
#: Cheap test that most lines fail.
_QUICK = (b"oss", b"OSS", b"iteration", b"step", b"%|", b"Epoch", b"ppl", b"ctc", b"tokens_per", b"grad", b"=", b"trl:",
          b"ation took")
MAX_VALUES = 40
#: A larger "step" is a damaged line.
MAX_STEP = 10**15


def find_progress(block: bytes, style: Style) -> list[Progress]:
    """All progress lines of `block`; `line` and `offset` relative to its start (the first line is 0)."""
    found: list[Progress] = []
    offset, open_block = 0, None
    for number, raw in enumerate(block.split(b"\n")):
        size = len(raw) + 1
        if len(raw) < 4000 and any(word in raw for word in _QUICK):
            if b"\r" in raw:
                raw = raw.rstrip(b"\r").rsplit(b"\r", 1)[-1]
            text = clean(raw.decode("utf-8", "replace"))
            if open_block is not None and open_block.kind == "olmo" and (value := _OLMO_VALUE.search(text)):
                if len(open_block.values) < MAX_VALUES:
                    open_block.values[_key(value[1])] = _float(value[2])
            elif open_block is not None and open_block.kind == "megatron" and _BROKEN.match(text):
                open_block.values |= _piped(text) if len(open_block.values) < MAX_VALUES else {}
            else:
                item = parse_line(text, style)
                open_block = item if item is not None and item.kind in ("olmo", "megatron") else None
                if item is not None:
                    item.line, item.offset = number, offset
                    found.append(item)
        offset += size
    return found


def parse_line(text: str, style: Style = Style()) -> Progress | None:  # noqa: B008 - frozen
    """The progress that one line reports, or None."""
    if "rror" in text and ("Traceback" in text or "Error:" in text):
        return None
    if (special := parse_special(text, style)) is not None:
        return special
    if m := _MEGATRON.search(text):
        return _made(text, style, int(m[1]), int(m[2]), _piped(m[3]), "megatron")
    if m := _OLMO.search(text):
        return _made(text, style, int(m[1]), int(m[2]) if m[2] else None, {}, "olmo")
    if (m := _DICT.search(text)) is not None:
        values = {_key(k): _float(v) for k, v in _PAIR.findall(text)[:MAX_VALUES]}
        step = next((values[k] for k in ("step", "global_step", "num_updates", "iteration") if k in values), None)
        if not any("loss" in k or "grad" in k for k in values):  # a bar may end with a dictionary of other metrics
            return _bar(text, style) if "%|" in text or "/s, " in text else None
        kind = "summary" if "train_runtime" in values or any(k.startswith("eval") for k in values) else "dict"
        if _SPLIT_BEFORE.search(text, 0, m.start()):  # "val: {'epoch': 3, 'loss': 0.1}"
            kind = "summary"
        if step is None and (count := _COUNT.search(text)):
            return _made(text, style, int(count[1]), int(count[2]), values, kind)
        known = step is not None and step == step and abs(step) < MAX_STEP
        return _made(text, style, int(step) if step is not None and known else -1, None, values, kind)
    if m := _EPOCH.search(text):
        return _made(text, style, int(m[2]), int(m[3]), _fields(text) | _words(text) | _meters(text), f"epoch {m[1]}")
    if (bar := _bar(text, style)) is not None:
        return bar
    if m := _KERAS.search(text):
        return _made(text, style, int(m[1]), int(m[2]), _fields(text), "keras")
    if (m := _step(text)) and _METRIC.search(text):
        values = _fields(text) | _words(text)
        if "loss" in values and _OTHER_LOSS.search(text):
            values["val_loss"] = values.pop("loss")
        values = {k: v for k, v in values.items() if _METRIC.search(k.replace("_", " ")) or k in ("epoch", "skipped")
                  or "scale" in k or "mfu" in k or "flops" in k}
        if values:
            return _made(text, style, int(m[1]), int(m[2]) if m[2] else None, values, "step")
    return _loose(text, style)


def _piped(text: str) -> dict[str, float]:
    """"lm loss: 2.1 | grad norm: nan |" of Megatron-LM."""
    found = ((_key(key), _maybe(value)) for key, value in _PIPED.findall(text)[:MAX_VALUES])
    return {key: number for key, number in found if number is not None}


def _bar(text: str, style: Style) -> Progress | None:
    """A tqdm bar, with a total or, when it carries a loss, without."""
    if "%|" in text and (m := _TQDM.search(text)):
        kind = "bar " + re.sub(r"\d+", "#", re.sub(r"^.*\]:?\s*", "", m["desc"]).strip())[-40:]
        made = _made(text, style, int(m["n"]), int(m["total"]), _fields(m["desc"]) | _fields(m["rest"]), kind)
    elif ("/s" in text or "s/" in text) and "oss" in text and (m := _UNBOUNDED.search(text)):
        made = _made(text, style, int(m["n"]), None, _fields(m["rest"]), "bar")
    else:
        return None
    made.elapsed = _clock_seconds(m["elapsed"])
    return made


def _step(text: str) -> re.Match[str] | None:
    """The step counter of a line: the one called a step where several counters are printed."""
    found = [m for m in _STEP.finditer(text) if not (m[2] is None and _PLURAL.search(m[0])
                                                     and _SETTING.search(text[:m.start() + 1]))][:6]
    return next((m for m in found if _STEPPED.search(m[0])), found[0] if found else None)


def _loose(text: str, style: Style) -> Progress | None:
    """Any key that ends in "loss", beside any counter; without the word for another split than training."""
    if len(text) > 600 or _OTHER_SPLIT.search(text):
        return None
    losses = {_key(k): _float(v) for k, v in _ANY_LOSS.findall(text)[:MAX_VALUES]}
    count = _ANY_COUNT.search(text) if losses else None
    if count is None:
        if losses and (m := _TRAIN_LOSS.match(text)) is not None:  # the counter stands on a line of its own
            return _made(text, style, -1, None, {"train_loss": _float(m[1])} | _words(text), "loose epoch")
        return None
    if count[1] is None:
        return _made(text, style, int(count[3]), None, losses, "loose epoch")
    return _made(text, style, int(count[1]), int(count[2]), losses, "loose")


def _clock_seconds(text: str) -> float | None:
    """"1:40:05" or "02:31" in seconds."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(part.isdigit() and len(part) < 8 for part in parts):
        return None
    return sum(int(part) * factor for part, factor in zip(reversed(parts), (1, 60, 3600), strict=False))


def _made(text: str, style: Style, step: int, total: int | None, values: dict[str, float], kind: str) -> Progress:
    step, total = step if step < MAX_STEP else -1, total if total is not None and total < MAX_STEP else None
    return Progress(step=step, total=total, values=values, kind=kind, line=0, offset=0, text=text[:400],
                    speaker=front_speaker(text, style))


def _fields(text: str) -> dict[str, float]:
    return {_key(k): _float(v) for k, v in _FIELD.findall(text)[:MAX_VALUES]}


def _words(text: str) -> dict[str, float]:
    found = {_key(k): _float(v) for k, v in _WORD_VALUE.findall(text)}
    return found | {_key(k): _float(v) for k, v in _IS_VALUE.findall(text)} if " is " in text else found


def _meters(text: str) -> dict[str, float]:
    """"Time 0.414 (0.402)   Data 0.001 (0.001)" of the ImageNet example and its descendants: seconds per step."""
    return {{"time": "iter_time", "data": "data_time"}[k.lower()[:4]]: _float(v) for k, v in _METER.findall(text)}


@lru_cache(maxsize=4096)
def _key(name: str) -> str:
    """"lm loss" -> "lm_loss"; words that only lead up to the name are dropped by keeping its last part."""
    name = re.split(r"[|,;]|\s{2,}", name.strip())[-1]
    return re.sub(r"\s+", "_", name.strip().lower())[-60:]


def _maybe(text: str) -> float | None:
    try:
        return float(text.replace(",", "") if "," in text else text)
    except ValueError:
        return None


def _float(text: str) -> float:
    number = _maybe(text)
    return float("nan") if number is None else number


#: "time: 2.89 data_time: 0.004" of mmengine, detectron2 and torchvision: seconds per step, no clock.
WAITS, DURATIONS = frozenset({"data_time", "data"}), {"time": "iter_time", "data": "data_time"}
#: Lines that tell only how long a step took: fewer are no series.
LEAST_DURATIONS = 8
#: Losses beside the one that is trained for, and the scale of fp16.
_NOT_THE_LOSS = re.compile(r"scale|balanc|aux|z_?loss|router|best|lbl|moe")


def loss_of(item: Progress) -> float | None:
    """The training loss of a progress line, under whichever name; None when it prints none."""
    values = item.values
    if math.isnan(values.get("loss", 0.0)) and "v_num=" in item.text:
        # Lightning's bar shows the mean of what the step returned, NaN where that is nothing; the run logs its own.
        logged = [values[name] for name in ("reduced_train_loss", "train_loss", "train_loss_step") if name in values]
        if logged:
            return logged[0]
    for name in ("lm_loss", "loss", "train_loss", "train/crossentropyloss", "train/loss", "ce", "total_loss",
                 "loss/train/total"):
        if name in values:
            return values[name]
    return next((v for k, v in values.items()
                 if "loss" in k and not _NOT_THE_LOSS.search(k) and not k.startswith(("eval", "val", "test"))), None)


def grad_norm_of(item: Progress) -> float | None:
    """The gradient norm of a progress line; None when it prints none."""
    for name in ("grad_norm", "gnorm", "grad-norm", "gradnorm", "optim/total_grad_norm", "train/grad_norm", "grad",
                 "gradient-norm", "gradient_norm"):
        if name in item.values:
            return item.values[name]
    return None
