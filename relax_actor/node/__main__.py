"""`python -P -m relax_actor.node`: run the node agent; see `relax_actor.node.keeper`."""

from relax_actor.node.keeper import main

main()
