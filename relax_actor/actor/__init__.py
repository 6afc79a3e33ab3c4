"""One OS process with one mailbox, handling one message at a time.

`base` is what users subclass, `ref` and `fanout` how they call it, `courier` what carries messages,
`runtime` the main thread that runs user code, `wire` the records in between.
"""

from relax_actor.actor.base import Actor, Context, endpoint
from relax_actor.actor.fanout import Stream, gather, gather_all, stream
from relax_actor.actor.ref import Ref, Reply

__all__ = ["Actor", "Context", "Ref", "Reply", "Stream", "endpoint", "gather", "gather_all", "stream"]
