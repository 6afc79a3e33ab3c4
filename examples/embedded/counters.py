"""Count words in three processes, one of which is killed on the way; no RL here.

    python examples/embedded/counters.py

Two counters take lines in turn and report to a store. One of them dies in the middle of its second line;
its supervisor starts it again, the call reaches its next incarnation, and no line is lost or counted twice.
"""

import os
import signal
from collections import Counter

from relax_actor import Actor, ChildSpec, Supervisor, SupervisorSpec, endpoint
from relax_actor.telemetry import read_events

LINES = ["the cat sat", "on the mat", "and the dog", "saw the cat", "on the dog", "on the mat"]


class Store(Actor):
    """Keeps what is counted, by line, so that a line told twice counts once."""

    def __init__(self) -> None:
        self.lines: dict[int, dict[str, int]] = {}

    @endpoint(idempotent=True)
    def put(self, line: int, words: dict[str, int]) -> None:
        self.lines[line] = words

    @endpoint(idempotent=True)
    def total(self) -> dict[str, int]:
        return dict(sum((Counter(words) for words in self.lines.values()), Counter()))


class LineCounter(Actor):
    """Counts the words of a line; its first incarnation does not survive line 2."""

    @endpoint(idempotent=True)  # may be repeated, so a call is sent again where the callee dies with it
    async def count(self, line: int, text: str) -> tuple[int, int]:
        if line == 2 and self.ctx.incarnation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await self.ctx.ref("store", Store).ask(Store.put, line, dict(Counter(text.split())))
        return self.ctx.incarnation, os.getpid()


TREE = SupervisorSpec(
    id="words",
    children=(ChildSpec(id="store", actor=Store), ChildSpec(id="counter", actor=LineCounter, replicas=2)),
)

if __name__ == "__main__":  # actors import this file too
    with Supervisor(TREE) as tree:
        counters = [tree.ref(f"counter/{i}", LineCounter) for i in range(2)]
        replies = [counters[line % 2].ask(LineCounter.count, line, text) for line, text in enumerate(LINES)]
        for line, reply in enumerate(replies):
            incarnation, pid = reply.result()
            print(f"line {line}: counter/{line % 2}, incarnation {incarnation}, pid {pid}")
        total = tree.ref("store", Store).ask(Store.total).result()
        print(dict(sorted(total.items())))
    for event in read_events(tree.run_dir / "events.jsonl")[0]:
        if event["kind"] == "child_exited" and event["reason"] == "SIGKILL":
            print(event["line"])
