"""Do some of the tests on one engine, in this process: `python -m actors.harness ray --tests a,b`.

The tests are written once for all engines. Their letters: a spawn, b one call after another, c many in
flight, d an array out and back, e one array to four actors, f a pending call when its actor is killed (fbig:
with 2 GiB touched), g a restart, i an orderly stop, k a grandchild when its parent is killed, s a hung actor,
x errors, orphan: the parent kills this process and watches. What is measured goes to `--out` as JSON.
"""

import argparse
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from actors import calls, deaths
from actors.engine import MODULES, Engine, Facts, load

TESTS: dict[str, Callable[[Engine, Facts], Awaitable[None]]] = {
    "a": calls.spawn,
    "b": calls.latency,
    "c": calls.throughput,
    "d": calls.arrays,
    "e": calls.broadcast,
    "f": deaths.detection,
    "fbig": deaths.detection_of_a_big_one,
    "g": deaths.restart,
    "i": deaths.orderly_stop,
    "k": deaths.grandchild,
    "s": deaths.hung,
    "x": deaths.errors,
    "orphan": deaths.orphan,
}


def main() -> None:
    """Run the tests asked for; an error of one is a fact, and the next is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=sorted(MODULES))
    parser.add_argument("--tests", required=True, help="letters, separated by commas")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    engine = load(args.engine)
    engine.run(_run(engine, args.tests.split(","), args.out))


async def _run(engine: Engine, tests: list[str], out: Path) -> None:
    await engine.start()
    facts: Facts = {"version": engine.version, "errors": {}}
    for test in tests:
        try:
            await TESTS[test](engine, facts)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is its result
            first_line = (str(error).splitlines() or [""])[0]
            facts["errors"][test] = f"{type(error).__name__}: {first_line[:200]}"
            print(f"{test}: {error!r}", file=sys.stderr, flush=True)
    out.write_text(json.dumps(facts))  # noqa: ASYNC240 - nothing else runs
    if "i" not in tests:
        await engine.stop()


if __name__ == "__main__":
    main()
