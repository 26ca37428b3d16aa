"""``python -m towline.gateway``: runs a gateway with the settings in JSON on standard input.

Settings come this way, not as arguments, so that the list of processes shows none of them.
"""

import sys

from towline.gateway.process import main

if __name__ == "__main__":
    sys.exit(main())
