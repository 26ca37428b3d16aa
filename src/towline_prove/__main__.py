"""``python -m towline_prove load | judge | soak``."""

from __future__ import annotations

from towline_prove.commands import main

main()
