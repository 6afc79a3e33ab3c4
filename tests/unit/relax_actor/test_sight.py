"""What a node agent sees of an incarnation, of this very process and of dead ones."""

import asyncio
import os
import time

import msgspec

from relax_actor.actor.page import PageRecord
from relax_actor.actor.wire import Look
from relax_actor.node.sight import LOG_LINES, Sight, Watched, sight_of

LOOK = Look(id=1, host="a", name="rollout/3", incarnation=2)


def see(run_dir, look=LOOK, **facts) -> Sight:
    return asyncio.run(sight_of(look, Watched(run_dir=run_dir, **facts)))


def test_of_who_was_never_there_nothing_is_seen(tmp_path) -> None:
    assert see(tmp_path) == Sight()


def test_a_live_one_is_seen_with_what_it_is_doing(tmp_path) -> None:
    since_s = time.monotonic() - 10
    page = PageRecord(incarnation=2, method="generate", method_since_s=since_s)
    sight = see(tmp_path, pid=os.getpid(), page=page)
    assert sight.facts.pid == os.getpid()
    assert sight.page == page
    assert 10 <= sight.in_method_s <= time.monotonic() - since_s
    assert sight.dump == ()


def test_who_has_no_handler_for_it_is_not_asked_for_its_stacks(tmp_path) -> None:
    look = msgspec.structs.replace(LOOK, wants_stacks=True)
    sight = see(tmp_path, look, pid=os.getpid())  # a SIGUSR1 would kill this process
    assert (sight.takes_dumps, sight.dump) == (False, ())


def test_of_a_dead_one_there_is_what_it_left(tmp_path) -> None:
    for folder in ("logs", "crash"):
        (tmp_path / folder).mkdir()
    page = PageRecord(incarnation=2, method="generate")
    lines = [f"line {number}" for number in range(LOG_LINES + 1)]
    (tmp_path / "logs" / "rollout-3-2.log").write_text("\n".join(lines))
    (tmp_path / "crash" / "rollout-3-2.json").write_bytes(msgspec.json.encode(page))
    (tmp_path / "crash" / "rollout-3-2.txt").write_text("Traceback")
    sight = see(tmp_path)
    assert (sight.facts, sight.page, sight.has_traceback) == (None, page, True)
    assert sight.log == tuple(lines[1:])
    assert sight.crash == (str(tmp_path / "crash" / "rollout-3-2.txt"),)


def test_a_page_that_was_cut_short_is_no_page(tmp_path) -> None:
    (tmp_path / "crash").mkdir()
    (tmp_path / "crash" / "rollout-3-2.json").write_text("{")
    assert see(tmp_path).page is None
