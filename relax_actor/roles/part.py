"""The part of a replica that is on another host than its rollout: further ranks of the same SGLang server.

The rollout has the first node, which answers; a part has one of the others, a server process of its own on
its host, with the GPUs there. They are one replica: the death of any ends all (they are linked, see
`app.run`), and the next incarnation of the rollout asks the next incarnations of its parts. So a process of a
part has one server in its life, and nobody who starts meets what is left of an older one.
"""

import msgspec

from relax_actor.actor import Actor, endpoint
from relax_actor.config import Config
from relax_actor.devices import host_gpus, replica_groups
from relax_actor.engines.sglang.errors import ServerGoneError
from relax_actor.engines.sglang.server import Server
from relax_actor.faults import point
from relax_actor.homes import ROLLOUT
from relax_actor.roles.engine_choice import model_config
from relax_actor.roles.sglang_server import remember, server_log, server_settings

LOOK_S = 0.2
"""How often its main process is looked at, until there is a whole server to watch."""

ANSWER_S = 15.0
"""How long a part that is there may take to start a process, or to say something."""


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A part's server has been started; it may be far from being up."""

    incarnation: int  # of the part
    host: str


class Part(Actor):
    """One node of a replica's server but the first.

    Args:
        config: the run's.
        reads_text: whether servers look for stop strings.
    """

    def __init__(self, config: Config, *, reads_text: bool = False) -> None:
        self._config, self._reads_text = config, reads_text
        further = config.rollout.hosts_per_replica - 1
        self._rollout, self._node = f"{ROLLOUT}/{self.ctx.replica // further}", 1 + self.ctx.replica % further
        self._server: Server | None = None
        self._serves_for = 0  # which incarnation of the rollout
        self._is_watched = self._is_over = False
        self._death = ""

    @endpoint(timeout_s=ANSWER_S, idempotent=True)
    def start(self, incarnation: int, meeting: str) -> Begun | None:
        """Start the server, unless that was done.

        Args:
            incarnation: of the rollout.
            meeting: where the nodes meet.

        Returns:
            None where there was one for another incarnation: it ends, and this process with it, and the next
            one has to be asked.
        """
        if self._serves_for not in {0, incarnation}:
            self._retire()
            return None
        point("part_asked")
        if self._server is None:
            self._serves_for, self._server = incarnation, self._started(meeting)
            self.ctx.events.emit(
                "part_started",
                rollout=self._rollout,
                incarnation=incarnation,
                node=self._node,
                server_pid=self._server.pid,
                log=self._server.log.name,
            )
        return Begun(incarnation=self.ctx.incarnation, host=self.ctx.host)

    @endpoint
    def watch(self, incarnation: int) -> None:
        """Have the end of any process of the server noticed at once: all are there by now."""
        if self._server is not None and not self._is_over and incarnation == self._serves_for:
            self._is_watched = True
            self._server.watch(self._died)

    @endpoint(timeout_s=ANSWER_S, idempotent=True)
    def last_word(self) -> str:
        """Return the last line of the server's log that says something."""
        return self._server.last_word() if self._server is not None else ""

    @endpoint(timeout_s=ANSWER_S, idempotent=True)
    def end(self, incarnation: int) -> None:
        """Kill the server: the rollout is about to kill its own."""
        if incarnation == self._serves_for:
            self._end()

    def step(self) -> float | None:
        """Look whether the server lives.

        Raises:
            ServerGoneError: it does not.
        """
        if self._server is None or self._is_over:
            return None
        ended = self._server.end()
        if self._death or ended:
            last = self._server.last_word()
            self._end()
            raise ServerGoneError(self._death or f"SGLang's node {self._node} {ended}; its last word: {last}")
        if self._is_watched:
            return None
        self.ctx.progress(f"node {self._node} of {self._rollout} starts: {self._server.last_word()}")
        return LOOK_S

    def on_peer_gone(self, name: str, incarnation: int, reason: str) -> None:  # noqa: ARG002 - as the hook is
        """End with the incarnation of the rollout that it is for."""
        if name == self._rollout and incarnation == self._serves_for:
            self._retire()

    def on_stop(self, reason: str) -> None:  # noqa: ARG002 - the hook's signature
        """Kill the server."""
        self._end()

    def _started(self, meeting: str) -> Server:
        config, rollout = self._config, self._config.rollout
        devices = replica_groups(rollout.device, host_gpus(), rollout.gpus_each)[0]
        first = server_settings(
            config,
            devices,
            context_tokens=model_config(config)["max_position_embeddings"],
            reads_text=self._reads_text,
        )
        settings = msgspec.structs.replace(first, node=self._node, meeting=meeting, address=self.ctx.listen)
        return Server(settings, server_log(self.ctx), remember=lambda files: remember(self.ctx, files))

    def _died(self, what: str) -> None:
        """Learn, in another thread, that a process of the server has ended."""
        self._death = what
        self.ctx.wake()

    def _retire(self) -> None:
        self._end()
        self.ctx.finish()

    def _end(self) -> None:
        self._is_over = True
        if self._server is not None:
            self._server.kill()
