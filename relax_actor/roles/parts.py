"""A rollout's view of its replica's parts on other hosts: has them start, looks that they are there."""

import contextlib
import time

from relax_actor.actor import Context, Ref
from relax_actor.engines.sglang.errors import StartError
from relax_actor.engines.sglang.server import held_port
from relax_actor.engines.sglang.settings import meeting_address
from relax_actor.errors import ActorDied, ActorError
from relax_actor.homes import parts_of
from relax_actor.roles.part import Begun, Part
from transport.ports import bind_allowed

AWAIT_S = 240.0
"""How long a rollout that starts waits for a part that is being started, or whose host is away."""

SHORT_S = 1.0
"""How long a part may take to answer what the rollout's own end does not wait for any longer."""

LOOK_S = 0.05


class Parts:
    """The nodes of a replica's server but the first; of a replica on one host there are none.

    Must be used in the rollout's main thread.

    Args:
        context: of the rollout.
        hosts: over how many the replica is spread.
    """

    def __init__(self, context: Context, hosts: int) -> None:
        self._context = context
        self._refs = [context.ref(name, Part) for name in parts_of(context.replica, hosts)]
        self._begun: dict[str, Begun] = {}
        self.meeting = ""
        if self._refs:
            own = context.listen or "127.0.0.1"
            every = "::" if ":" in own else "0.0.0.0"  # noqa: S104 - torch's store listens at all addresses
            self._held = bind_allowed(lambda port: held_port(every, port))
            self.meeting = meeting_address(own, self._held.getsockname()[1])

    def start(self) -> None:
        """Have each part start its server; returns when all have.

        Raises:
            StartError: one did not; says which.
        """
        for ref in self._refs:
            self._begun[ref.name] = self._asked(ref)

    def check(self) -> None:
        """Look whether the parts that have started are still there: who waits to meet them would for long.

        Raises:
            StartError: one is not.
        """
        for ref in self._refs:
            begun = self._begun.get(ref.name)
            if begun is not None and ref.incarnation != begun.incarnation:
                raise self._failed(ref, f"was on {begun.host} and has gone")

    def watch(self) -> None:
        """Have each part look after its server, which is whole."""
        for ref in self._refs:
            ref.tell(Part.watch, self._context.incarnation)

    def explained(self, error: StartError) -> StartError:
        """Return why the first node's server did not come up, with what the others say."""
        if not self._begun:
            return error
        words = "; ".join(f"{ref.name} on {self._begun[ref.name].host}: {_word(ref)}" for ref in self._refs)
        return StartError(f"{error.fact} ({words})", error.last_line, error.log)

    def end(self) -> None:
        """Have the parts end their servers first: the first node's end would be a failure to them."""
        asked = [ref.within(SHORT_S).ask(Part.end, self._context.incarnation) for ref in self._begun_refs()]
        for reply in asked:
            reply.exception()

    def _begun_refs(self) -> list[Ref[Part]]:
        return [ref.pin() for ref in self._refs if ref.name in self._begun]

    def _asked(self, ref: Ref[Part]) -> Begun:
        deadline = time.monotonic() + AWAIT_S
        while time.monotonic() < deadline:
            if ref.incarnation is None:
                self._context.progress(f"waits for {ref.name}")
            elif begun := self._answer(ref):
                return begun
            time.sleep(LOOK_S)
        raise self._failed(ref, f"was not there within {AWAIT_S:g} s")

    def _answer(self, ref: Ref[Part]) -> Begun | None:
        """Return what a part that is there answers; None: its next incarnation is to be asked."""
        reply = ref.pin().ask(Part.start, self._context.incarnation, self.meeting)
        error = reply.exception()
        if error is None:
            return reply.result()
        if isinstance(error, ActorDied):
            return None
        raise self._failed(ref, f"did not start its server: {error}") from error

    def _failed(self, ref: Ref[Part], fact: str) -> StartError:
        log = self._context.run_dir / "logs"
        return StartError(f"has no {ref.name}, which {fact}", "", str(log))


def _word(ref: Ref[Part]) -> str:
    with contextlib.suppress(ActorError):
        return ref.within(SHORT_S).ask(Part.last_word).result() or "it said nothing"
    return "no answer"
