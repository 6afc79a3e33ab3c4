"""`python -P -m relax_actor.node`: run the node agent; see `relax_actor.node.keeper`.

With `--stdin-frame` it is at the far end of a session such as ssh's: see `relax_actor.node.porter`.
"""

import sys

from relax_actor.node import keeper, porter

if "--stdin-frame" in sys.argv[1:]:
    porter.main()
else:
    keeper.main()
