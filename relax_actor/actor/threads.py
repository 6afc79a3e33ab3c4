"""What every thread of this process does right now, as text."""

import sys
import threading
import traceback


def stacks_of_all_threads() -> str:
    """Return the Python stacks of all threads, the main thread's first, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()  # noqa: SLF001 - meant for debuggers, and this is one
    main_first = sorted(frames.items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in main_first
    )
