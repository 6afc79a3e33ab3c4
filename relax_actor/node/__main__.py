"""`python -P -m relax_actor.node`: run the node agent; see `relax_actor.node.agent`."""

from relax_actor.node.agent import main

main()
