"""Asynchronous RL post-training in supervised OS processes, without Ray.

Embed it with `Supervisor`; run it with `relax-actor launch`. The tour of the code is docs/tour.md.
"""

from relax_actor._neighbours import claim

claim("transport")

from relax_actor.actor import (  # noqa: E402 - after `transport` is ours
    Actor,
    Context,
    Ref,
    Reply,
    endpoint,
    gather,
    gather_all,
    stream,
)
from relax_actor.supervision.events import Decision  # noqa: E402
from relax_actor.supervision.hook import Failure  # noqa: E402
from relax_actor.supervision.spec import (  # noqa: E402
    Backoff,
    ChildSpec,
    Elastic,
    Home,
    Intensity,
    RestartType,
    Strategy,
    SupervisorSpec,
)
from relax_actor.supervision.supervisor import Supervisor  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "Backoff",
    "ChildSpec",
    "Context",
    "Decision",
    "Elastic",
    "Failure",
    "Home",
    "Intensity",
    "Ref",
    "Reply",
    "RestartType",
    "Strategy",
    "Supervisor",
    "SupervisorSpec",
    "endpoint",
    "gather",
    "gather_all",
    "stream",
]
