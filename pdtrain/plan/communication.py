"""Bytes that one rank sends per optimizer step, per collective and group, and how long they take on given links.

Volumes (T local tokens, c bytes, n ranks): ring all-gather or reduce-scatter (n - 1) / n of the whole; all-reduce
twice that; all-to-all of the experts T k h c (1 - 1 / EP) per pass, four passes per MoE layer and micro-batch; TP with
sequence parallel four (n - 1) / n s b h c forward and as many backward; a pipeline boundary s b h c each way; a
context-parallel ring (n - 1) / n of keys and values forward, twice backward. Where a group spans nodes, the slower link
carries the share of the bytes whose peer is on another node.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdtrain.plan import states
from pdtrain.plan.activations import routed_rows
from pdtrain.plan.hardware import Hardware
from pdtrain.plan.setup import Setup, Stage

#: Share of a link's rate that large collectives reach, inside and across nodes. NCCL's own tables show 0.7 - 0.9; kept
#: as one number each so that docs/plan.md can say how well the plan does with them.
LINK_EFFICIENCY = {"node": 0.75, "network": 0.80}
#: Share of the traffic of DP (ZeRO-1/2/3) and of PP that is hidden under compute where a framework overlaps it.
OVERLAP = {"dp": 0.85, "tp": 0.0, "ep": 0.35, "cp": 0.8, "pp": 0.8}


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective of one rank in one optimizer step.

    bytes: sent per rank and step; across: share of them that leaves the node; seconds: alone on the links; exposed:
    seconds that nothing hides.
    """

    collective: str
    group: str
    size: int
    calls: float
    bytes: float
    across: float
    seconds: float
    exposed: float


def spread(size: int, stride: int, per_node: int) -> float:
    """Share of a ring's or an all-to-all's bytes that leave the node, for `size` ranks `stride` apart."""
    if size <= 1:
        return 0.0
    inside = max(1, per_node // stride) if stride < per_node else 1
    inside = min(size, inside)
    return 0.0 if inside == size else (size - inside) / (size - 1)


def ring_across(size: int, stride: int, per_node: int) -> float:
    """1 where a ring of these ranks has to leave the node at all: its slowest link decides."""
    return 1.0 if size > 1 and (size - 1) * stride >= per_node else 0.0


def overlap(setup: Setup, group: str) -> float:
    """Share of a group's traffic that compute hides. DualPipe is built to hide the experts' all-to-all."""
    key = group.split()[0].lower().replace("edp", "dp")
    stated = dict(setup.options.overlap)
    if key in stated:
        return stated[key]
    if key == "ep" and setup.options.schedule == "dualpipe":
        return 0.95
    return OVERLAP[key]


def _crossing(setup: Setup, per_node: int) -> float:
    """Nodes that a token visits / experts that it visits, where rows for one node cross the network once.

    Routing limited to groups visits at most as many nodes as groups; else k experts lie on N (1 - (1 - 1/N)^k) of the N
    nodes of a group in the mean.
    """
    moe = setup.run.model.moe
    nodes = -(-setup.ep // per_node)
    if not setup.options.node_limited or nodes == 1:
        return 1.0
    visited = nodes * (1 - (1 - 1 / nodes) ** moe.top_k)
    if moe.groups > 1:
        visited = min(moe.top_groups, nodes)
    return min(1.0, visited / moe.top_k)


class _Links:
    def __init__(self, hardware: Hardware) -> None:
        self.per_node, self.latency = hardware.devices_per_node, hardware.latency
        # what a probe measured is what was reached; of a data sheet's rate only a share is
        self.node, self.network = (
            rate * (1.0 if f"{kind}_bandwidth" in hardware.measured else LINK_EFFICIENCY[kind])
            for kind, rate in (("node", hardware.node_bandwidth), ("network", hardware.network_bandwidth))
        )

    def ring(self, size: int, stride: int, volume: float, calls: float) -> tuple[float, float]:
        """(share across, seconds). With d members on a node, d rings share the node's d network devices."""
        across = ring_across(size, stride, self.per_node)
        if not across:
            return 0.0, volume / self.node + calls * self.latency
        inside = max(1, min(size, self.per_node // stride)) if stride < self.per_node else 1
        # hierarchical ring: 1/inside of the volume crosses on each device's own adapter, the rest stays inside
        crossing = volume / inside
        return 1.0 / inside, max(crossing / self.network, volume / self.node) + calls * self.latency * 2

    def all_to_all(self, size: int, volume: float, calls: float, crossing: float = 1.0) -> tuple[float, float]:
        """`crossing`: factor on the bytes between nodes, below 1 where rows for one node travel once."""
        across = spread(size, 1, self.per_node) * crossing
        inside = volume * (1 - spread(size, 1, self.per_node)) / self.node
        if crossing < 1:
            inside = volume / self.node  # what arrives once is handed on inside the node
        return across, max(inside, volume * across / self.network) + calls * self.latency


def traffic(setup: Setup, stage: Stage, hardware: Hardware) -> list[Traffic]:
    """Everything that one rank of `stage` sends in one optimizer step."""
    links, found = _Links(hardware), []
    model, batches = setup.run.model, setup.micro_batches
    h, c = model.hidden, setup.itemsize("attention")

    def add(collective: str, group: str, size: int, calls: float, volume: float, timing: tuple[float, float]) -> None:
        across, seconds = timing
        hidden = overlap(setup, group)
        found.append(Traffic(collective, group, size, calls, volume, across, seconds, seconds * (1 - hidden)))

    if setup.tp > 1:
        calls = (4.0 * stage.dense + 2 * stage.moe) * batches * 2  # a MoE layer keeps the sequence split
        calls += (2 * batches if stage.head else 0) + (batches if stage.embedding else 0)
        # a repeated block gathers and reduces again; of repeated operations only the gathers: what was reduced is kept
        passes = 1.5 if setup.options.recompute == "op" else 1 + setup.repeated_blocks
        calls *= (1 + passes) / 2
        volume = calls * (setup.tp - 1) / setup.tp * setup.tokens * h * c
        add("all-gather / reduce-scatter", "TP", setup.tp, calls, volume, links.ring(setup.tp, 1, volume, calls))
    if setup.cp > 1:
        kv = 2 * model.kv_heads * model.head_dim if model.attention == "gqa" else (
            2 * model.heads * (model.mla.qk_nope_head_dim + model.mla.v_head_dim)
        )
        calls = 3.0 * stage.layers * batches
        volume = calls * (setup.cp - 1) * setup.tokens * kv / setup.tp * c
        add("ring of keys and values", "CP", setup.cp, calls, volume, links.ring(setup.cp, setup.tp, volume, calls))
    if setup.ep > 1 and stage.moe:
        leaving, arriving = routed_rows(setup)
        again = 2.0 * max(setup.repeated_blocks, float("moe" in setup.options.drop))
        calls = (4.0 + again) * stage.moe * batches
        item: float = setup.itemsize("experts")
        first = setup.options.dispatch_bytes or item  # dispatch forward only: what comes back is summed
        per_entry = item * (3 + again / 2) + first * (1 + again / 2)
        volume = per_entry * stage.moe * batches * max(leaving, arriving) * h * (1 - 1 / setup.ep)
        timing = links.all_to_all(setup.ep, volume, calls, _crossing(setup, links.per_node))
        add("all-to-all (dispatch, combine)", "EP", setup.ep, calls, volume, timing)
    if setup.pp > 1:
        calls = 2.0 * batches * setup.options.virtual
        volume = calls * setup.local_tokens * h * c
        rate = links.network if setup.stage_ranks >= links.per_node else links.node
        add("send / receive", "PP", setup.pp, calls, volume, (1.0, volume / rate + calls * hardware.latency))
    found += _data_parallel(setup, stage, links)
    return found


def _data_parallel(setup: Setup, stage: Stage, links: _Links) -> list[Traffic]:
    """Gradients and weights over DP, EDP and the router's ranks: what the ZeRO stage makes of them."""
    found = []
    units = stage.layers * 2 + stage.embedding + stage.head
    groups: dict[str, tuple[int, int, list[tuple[states.Tensor, int]]]] = {
        "DP": (setup.stage_ranks // setup.tp, setup.tp, []),
        "EDP": (setup.edp, setup.ep, []),
        "DP (router)": (setup.stage_ranks, 1, []),
    }
    for tensor, count in states.stage_tensors(setup, stage):
        name = {"experts": "EDP", "router": "DP (router)", "shared_expert": "DP (router)"}.get(tensor.row, "DP")
        if tensor.trained:
            groups[name][2].append((tensor, count))
    for name, (size, stride, tensors) in groups.items():
        if size == 1 or not tensors:
            continue
        entries = sum(count * states.entries(states.local_shape(tensor, setup)) for tensor, count in tensors)
        item = setup.itemsize(tensors[0][0].row)
        gradient = 4 if setup.states == "fsdp" or not setup.options.gradient_bytes else setup.options.gradient_bytes
        share = (size - 1) / size
        # zero3 gathers before forward and backward of every micro-batch and reduces once per step
        gathers = {"none": 0.0, "zero1": 1.0, "zero2": 1.0, "zero3": 2.0 * setup.micro_batches}[setup.sharding]
        reduces = 2.0 if setup.sharding == "none" else 1.0
        if setup.options.reduce_each and setup.sharding == "zero3":
            reduces = float(setup.micro_batches)
        volume = entries * share * (gathers * item + reduces * gradient)
        started = units * (gathers + reduces)
        across, seconds = links.ring(size, stride, volume, started)
        kind = "all-reduce" if setup.sharding == "none" else "all-gather / reduce-scatter"
        hidden = overlap(setup, "DP")
        found.append(Traffic(kind, name, size, started, volume, across, seconds, seconds * (1 - hidden)))
    return found
