"""``python -m towline``: the command line."""

from towline.cli import main

main()
