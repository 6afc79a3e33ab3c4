"""A dump of faulthandler is told from what an actor itself said, and read."""

import faulthandler
import subprocess
import sys
import threading

from relax_actor.stacks import is_dump_line, parse_dump


def test_a_real_dump_is_read_thread_by_thread(tmp_path):
    waiting, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (waiting.set(), go.wait()))
    thread.start()
    waiting.wait()
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().splitlines()
    go.set()
    thread.join()

    stacks = parse_dump(["something else", *lines])

    assert all(is_dump_line(line) for line in lines if line)
    (current,) = (stack for stack in stacks if stack.is_current)
    assert current.frames[0].function == "test_a_real_dump_is_read_thread_by_thread"
    assert current.frames[0].file == __file__
    assert str(current.frames[0]) in lines
    assert "wait" in {frame.function for stack in stacks if not stack.is_current for frame in stack.frames}


def test_a_crash_of_native_code_is_read_too():
    code = "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    lines = [line for line in done.stderr.splitlines() if line]

    assert [frame.line for frame in parse_dump(lines)[0].frames] == [1]
    assert all(map(is_dump_line, lines))


def test_what_an_actor_says_is_no_dump():
    assert not any(
        map(is_dump_line, ["", "Thread 5 is ready", '  File "x.py" is missing', "File", "  <module>x"])
    )


def test_a_frame_whose_line_is_unknown_is_line_0():
    (stack,) = parse_dump(["Thread 0x7f (most recent call first):", '  File "a.py", line ??? in f', "  ..."])
    assert (stack.frames[0].line, stack.frames[0].function) == (0, "f")
    assert parse_dump(['  File "a.py", line 3 in f']) == []
