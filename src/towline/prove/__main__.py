"""``python -m towline.prove load | judge | soak``."""

from __future__ import annotations

from towline.prove.commands import main

main()
