"""An actor that has something to finish when it is to leave."""

import time

from relax_actor import Actor


class Slow(Actor):
    """Needs a second before it may leave."""

    def __init__(self) -> None:
        self.until_s = 0.0

    def on_drain(self) -> None:
        self.until_s = time.monotonic() + 1.0

    def step(self) -> float | None:
        if self.until_s and time.monotonic() >= self.until_s:
            self.ctx.events.emit("finished_first", what=self.ctx.replica)
            self.ctx.finish()
        return 0.05
