"""``python -m towline.cli``: the same as the command ``towline``, where scripts are not on the path."""

from __future__ import annotations

from towline.cli import main

if __name__ == "__main__":
    main()
