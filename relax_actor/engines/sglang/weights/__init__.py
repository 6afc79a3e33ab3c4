"""How policy versions get into a running SGLang server; `updater.Updater` is all that an engine needs."""

from relax_actor.engines.sglang.weights.borders import as_sampled
from relax_actor.engines.sglang.weights.errors import DigestError, RouteClosedError, SglangUpdateError
from relax_actor.engines.sglang.weights.memory import MemoryTag, ServerMemory
from relax_actor.engines.sglang.weights.plan import UpdateMode
from relax_actor.engines.sglang.weights.records import Deadlines, UpdateReport, UpdateSettings
from relax_actor.engines.sglang.weights.routes import UpdateRoute, WeightPlacement
from relax_actor.engines.sglang.weights.updater import Updater

__all__ = [
    "Deadlines",
    "DigestError",
    "MemoryTag",
    "RouteClosedError",
    "ServerMemory",
    "SglangUpdateError",
    "UpdateMode",
    "UpdateReport",
    "UpdateRoute",
    "UpdateSettings",
    "Updater",
    "WeightPlacement",
    "as_sampled",
]
