"""An actor that has something to finish when it is to leave."""

from relax_actor import Actor


class Slow(Actor):
    """Is done once the run folder has a file `go`."""

    def __init__(self) -> None:
        self.is_leaving = False

    def on_drain(self) -> None:
        self.is_leaving = True

    def step(self) -> float | None:
        if self.is_leaving and (self.ctx.run_dir / "go").exists():
            self.ctx.events.emit("finished_first", what=self.ctx.replica)
            self.ctx.finish()
        return 0.05
