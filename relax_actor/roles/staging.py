"""The GPU routes between a rollout and the store of its host: who asks whom. torch is for those with GPUs."""

from typing import TYPE_CHECKING

from relax_actor.actor import Actor, Context, endpoint
from relax_actor.dcs.cuda.staging import StageReply, StageRequest
from relax_actor.dcs.routes import Route
from relax_actor.dcs.source import PolicySource
from transport.shm import ShmSpace

if TYPE_CHECKING:
    from relax_actor.dcs.cuda.stager import Stager
    from relax_actor.dcs.cuda.transfer import Staged

OPEN_S = 10.0
"""How long a store may take to begin: the first time it makes a CUDA context on the replica's GPU."""

TICK_S = 0.02


class StagingActor(Actor):
    """An actor that brings policy versions to the GPUs of its host."""

    stager: "Stager | None" = None

    @endpoint(timeout_s=OPEN_S)
    def stage(self, request: StageRequest) -> StageReply:
        """Bring a version to a GPU; what follows is in the page that the reply names."""
        if self.stager is None:
            return StageReply(refused="this store stages nothing")
        return self.stager.open(request)

    def start_staging(self, space: ShmSpace) -> None:
        """Begin to serve GPUs."""
        from relax_actor.dcs.cuda.ipc import Cuda  # noqa: PLC0415 - only where there are GPUs
        from relax_actor.dcs.cuda.stager import Stager  # noqa: PLC0415

        self.stager = Stager(space, Cuda(), incarnation=self.ctx.incarnation, on_staged=self._say_staged)

    def _say_staged(self, staged: "Staged") -> None:
        self.ctx.events.emit(
            "policy_staged",
            version=staged.version,
            route=staged.route,
            device=staged.device,
            nbytes=staged.nbytes,
            seconds=staged.seconds,
            copying_s=staged.copying_s,
            failure=staged.failure,
        )


def gpu_sources(context: Context, space: ShmSpace, store: str) -> list[PolicySource]:
    """Return the routes to torch's current GPU.

    Args:
        context: of the rollout.
        space: the run's shared memory.
        store: the name of the host's store.
    """
    from relax_actor.dcs.cuda.ipc import Cuda, current_device  # noqa: PLC0415 - only where there are GPUs
    from relax_actor.dcs.cuda.source import StagedSource  # noqa: PLC0415

    gpus = Cuda()
    ref = context.ref(store, StagingActor).within(OPEN_S)
    return [
        StagedSource(
            route,
            space,
            gpus,
            current_device(gpus),
            lambda request: ref.ask(StagingActor.stage, request).result(),
        )
        for route in (Route.CUDA_IPC, Route.PINNED)
    ]
