"""Proves a schedule again from its certificate, which `zc.compile(..., dump_dir=...)` writes (docs/proof.md)::

    python passes/check_certificate.py out/*/certificate.json

It needs the standard library alone, and knows no kind of node: a certificate says of each its stream, and what it waits
for, reads, writes and then records, in extents [start, stop); a stop of null is the end. That this is what the program
does, and what it ``owes`` and ``uses``, is taken on trust. Shown are the *order* of what conflicts, by chains along a
stream or from a record to the wait that sees it (two nodes ``outside`` of the schedule need none); *gradients*: each
owed one is brought once, whole, and each owed bucket reduced once; *weights* are read where and while they lie there.
"""

import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

Node = dict[str, Any]
END, NOTHING = float("inf"), "nothing"


def check(certificate: dict[str, Any]) -> list[str]:
    nodes: list[Node] = certificate["nodes"]
    if len({node["name"] for node in nodes}) < len(nodes):
        return ["two nodes have the same name"]
    faults = check_order(nodes, {tuple(each["nodes"]): each["chain"] for each in certificate["conflicts"]})
    return faults + Gradients(certificate).faults + Weights(certificate).faults


def at(node: Node) -> str:
    return f"{node['name']} on {node['stream']}"


def extent(start: float, stop: float) -> str:
    return f"[{start}, {'end' if stop == END else stop})"


def check_order(nodes: list[Node], chains: dict[tuple[str, ...], Any]) -> list[str]:
    latest, edges, faults = dict[str, int](), set[tuple[int, int]](), list[str]()
    for k, node in enumerate(nodes):  # a wait sees the latest record before it
        faults += [f"{at(node)} waits for {e}, which no node before records" for e in node["waits"] if e not in latest]
        edges |= {(latest[event], k) for event in node["waits"] if event in latest}
        latest.update(dict.fromkeys(node["records"], k))
    position = {node["name"]: k for k, node in enumerate(nodes)}
    for i, j, what in conflicts(nodes):
        chain = chains.get((nodes[i]["name"], nodes[j]["name"])) or ()
        steps = [position[name] for name in chain if name in position]
        is_chain = len(steps) == len(chain) and (steps[:1], steps[-1:]) == ([i], [j])
        for a, b in itertools.pairwise(steps) if is_chain else [(i, j)]:
            if (a, b) not in edges and not (is_chain and a < b and nodes[a]["stream"] == nodes[b]["stream"]):
                faults.append(f"{what}, and nothing orders {at(nodes[a])} and {at(nodes[b])}")
    return faults


def conflicts(nodes: list[Node]) -> Iterator[tuple[int, int, str]]:
    """The positions of two nodes, and what they do."""
    touches = defaultdict[str, list[tuple[int, str, float, float]]](list)
    for k, node in enumerate(nodes):
        for how in ("reads", "writes"):
            for buffer, start, stop in node[how]:
                touches[buffer].append((k, how, start, END if stop is None else stop))
    for buffer, accesses in touches.items():
        for (i, how, start, stop), (j, then, begin, end) in itertools.combinations(accesses, 2):
            first, second = nodes[i], nodes[j]
            is_free = first["stream"] == second["stream"] or (first["outside"] and second["outside"])
            if not is_free and "writes" in (how, then) and start < end and begin < stop:
                before, after = f"{how} {extent(start, stop)}", f"{then} {extent(begin, end)}"
                yield i, j, f"{buffer}: {at(first)} {before} and {at(second)} {after}"


class Gradients:
    """What each buffer holds, node by node: where conflicts are ordered, the file's order is as good as any."""

    def __init__(self, certificate: dict[str, Any]) -> None:
        self.buckets, self.entry, self.faults = certificate["buckets"], certificate["entry"], list[str]()
        self.holds: dict[str, tuple[int, str]] = {}  # buffer -> bucket, and what of it
        self.elements = defaultdict[str, list[list[int]]](list)  # buffer -> extents of the gradient that it holds
        self.brought: dict[tuple[int, int], Node] = {}  # bucket, slot -> its write or deposit
        self.done = Counter[tuple[str, int]]()  # (what, bucket)
        for node in certificate["nodes"]:
            if "gradient" in node:
                self.bring(node, **node["gradient"])
            for buffer, ways in node.get("contents", ()):
                self.move(node, buffer, ways)
            self.done.update([(node["done"], node["bucket"])] if "done" in node else ())
        for buffer, (bucket, content) in self.holds.items():
            if content not in certificate["exit"].get(buffer, [NOTHING]):
                self.faults.append(f"{buffer} holds the {content} of bucket {bucket} at the end, and nobody takes it")
            elif content == "gradient":
                self.check_elements(buffer, bucket)
        if certificate["owes"] is not None:
            self.settle(certificate["owes"])

    def bring(self, node: Node, buffer: str | None, extents: Any, slots: Any, gradient_of: Any) -> None:
        """``extents``: elements that are written; ``gradient_of``: of each value, the slots whose gradient it is."""
        bucket, layout = node["bucket"], self.buckets[str(node["bucket"])]["slots"]
        self.elements[buffer or "deposits"] += extents
        for slot, owners in itertools.zip_longest(slots, gradient_of):
            if slot is None or owners is None or slot >= len(layout) or (bucket, slot) in self.brought:
                self.faults.append(f"{at(node)} brings slot {slot} of bucket {bucket} without a gradient, or once more")
                continue
            self.brought[bucket, slot] = {**node, "owners": owners}
            first, last = layout[slot]
            if first < last and not any(start <= first and last <= stop for start, stop in extents):
                self.faults.append(f"{at(node)} writes {extents} of bucket {bucket}; slot {slot} is [{first}, {last})")

    def move(self, node: Node, buffer: str, ways: list[tuple[str, str]]) -> None:
        """``ways``: what it may hold before, each with what it holds after."""
        bucket, (of, content) = node["bucket"], self.holds.get(buffer) or self.entry.get(buffer, (0, NOTHING))
        left = [after for need, after in ways if need == content and (of == bucket or content == NOTHING)]
        if not left or buffer not in {name for name, *_ in (*node["reads"], *node["writes"])}:
            needs = " or ".join(need for need, _ in ways) or "another buffer"
            self.faults.append(f"{buffer} holds {content} (bucket {of}); {at(node)}, bucket {bucket}, needs {needs}")
        elif content == "gradient" != left[0]:
            self.check_elements(buffer, of)
        self.holds[buffer] = (bucket, [*left, *(after for _, after in ways), content][0])

    def check_elements(self, buffer: str, bucket: int) -> None:
        reached, numel = 0, self.buckets[str(bucket)]["numel"]
        for start, stop in [*sorted(self.elements.pop(buffer, [])), (numel, numel)]:
            if start != reached:
                how = "never" if start > reached else "twice"
                self.faults.append(f"{buffer}: {extent(*sorted((start, reached)))} of bucket {bucket} is written {how}")
            reached = max(reached, stop)

    def settle(self, owes: dict[str, Any]) -> None:
        owed = set(map(tuple, owes["gradients"]))
        for bucket, slot in sorted(owed - self.brought.keys()):
            self.faults.append(f"bucket {bucket}, slot {slot} is owed, and nobody brings it")
        for (bucket, slot), node in self.brought.items():
            if (bucket, slot) not in owed or [bucket, slot] not in node["owners"]:
                self.faults.append(f"{at(node)} brings bucket {bucket}, slot {slot}, whose gradient this is not")
            elif node["gradient"]["buffer"] is None and bucket in owes["whole"]:
                self.faults.append(f"{at(node)} leaves slot {slot} of bucket {bucket} to others; it is owed whole")
        wanted = Counter((what, bucket) for what in ("reduced", "landed") for bucket in owes[what])
        for (what, bucket), times in sorted(((self.done - wanted) + (wanted - self.done)).items()):
            self.faults.append(f"bucket {bucket} is {what} {times} times too often or too seldom")


class Weights:
    """Which sharded weights lie where, and which values of them may be read."""

    def __init__(self, certificate: dict[str, Any]) -> None:
        self.caller, self.held, self.faults = certificate["caller"], certificate["weights"], list[str]()
        self.alive: dict[tuple[str, int], list[int]] = {}  # buffer, bucket -> bytes
        self.readable: set[str] = set()  # values of the present window
        for node in certificate["nodes"]:
            if "gathers" in node:
                self.gather(node, *node["gathers"])
            self.read(node)
            self.window(node)
        uses = [node["use"] for node in certificate["nodes"] if "use" in node]
        if certificate["uses"] not in (None, uses):
            self.faults.append(f"the schedule reads buckets {uses}, and the pass {certificate['uses']}")
        left = [f"bucket {bucket} in {buffer}" for buffer, bucket in self.alive] + sorted(self.readable)
        self.faults += [f"{what} is there at the end, and nobody frees it" for what in left]

    def gather(self, node: Node, buffer: str, bucket: int, start: int, stop: int) -> None:
        nbytes, align, cap = self.held["nbytes"][str(bucket)], self.held["align"], self.held["cap"]
        others = [b for (name, b), (low, high) in self.alive.items() if name == buffer and start < high and low < stop]
        is_free = not others and (buffer, bucket) not in self.alive
        if not is_free or stop - start != nbytes or start < 0 or start % align or stop > cap:
            room = f"it needs {nbytes} bytes from a multiple of {align} on, free (there: buckets {others}), up to {cap}"
            self.faults.append(f"{at(node)} gathers bucket {bucket} into {buffer} {extent(start, stop)}, and {room}")
        self.alive[buffer, bucket] = [start, stop]

    def read(self, node: Node) -> None:
        for buffer, bucket, *bounds in (*node.get("uses", ()), *node.get("frees", ())):
            if self.alive.get((buffer, bucket)) != bounds:
                self.faults.append(f"{at(node)}: bucket {bucket} in {buffer} {extent(*bounds)} is not there")
            if "frees" in node:
                self.alive.pop((buffer, bucket), None)

    def window(self, node: Node) -> None:
        reads, writes = ({name for name, *_ in node[key]} & set(self.held["values"]) for key in ("reads", "writes"))
        self.readable = set() if "window" in node else self.readable
        bad = sorted(reads - self.readable | reads & set(node.get("keeps", ())))
        bad += [place for place in node.get("window", ()) if place[1] not in self.held["slots"].get(str(place[0]), ())]
        if bad or ((reads or {"use", "frees"} & node.keys()) and node["stream"] != self.caller):
            self.faults.append(f"{at(node)} reads the weights {bad or sorted(reads)} where they are not, or keeps them")
        self.readable |= set() if node["outside"] else writes


def main(paths: list[str]) -> int:
    status = int(not paths)
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                faults = check(json.load(file))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            faults = [f"this is no certificate: {type(error).__name__}: {error}"]
        print(*(f"{path}: {text}" for text in faults or ["accepted"]), sep="\n")
        status |= bool(faults)
    return status  # 1: a file was refused


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
