"""Strongly connected components, for wait-for graphs of a few thousand nodes (Tarjan's algorithm, no recursion)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def components(edges: Mapping[Node, Iterable[Node]]) -> list[list[Node]]:
    """The strongly connected components of `edges` (node -> nodes it waits for), each before those that wait for it."""
    order: dict[Node, int] = {}
    low: dict[Node, int] = {}
    on_stack: set[Node] = set()
    stack: list[Node] = []
    found: list[list[Node]] = []
    for root in edges:
        if root in order:
            continue
        work = [(root, iter(edges.get(root, ())))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for after in rest:
                if after not in order:
                    order[after] = low[after] = len(order)
                    stack.append(after)
                    on_stack.add(after)
                    work.append((after, iter(edges.get(after, ()))))
                    break
                if after in on_stack:
                    low[node] = min(low[node], order[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    found.append(component)
    return found


def terminal(edges: Mapping[Node, Iterable[Node]]) -> list[list[Node]]:
    """The components that wait for nobody outside of themselves."""
    return [part for part in components(edges)
            if not any(after not in inside for inside in (set(part),) for node in part
                       for after in edges.get(node, ()))]
