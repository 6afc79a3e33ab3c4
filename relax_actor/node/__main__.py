"""`python -P -m relax_actor.node`: run the node agent; see `relax_actor.node.keeper`.

With `--stdin-frame` it is at the far end of a session such as ssh's: see `relax_actor.node.porter`.
"""

import importlib
import sys

end = "porter" if "--stdin-frame" in sys.argv[1:] else "keeper"  # neither needs what the other imports
importlib.import_module(f"relax_actor.node.{end}").main()
