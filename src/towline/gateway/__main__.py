"""``python -m towline.gateway``: run the gateway whose settings come as JSON on standard input.

Settings come this way, not as arguments, so that nothing of them stands in the list of processes.
"""

import sys

from towline.gateway.process import main

if __name__ == "__main__":
    sys.exit(main())
