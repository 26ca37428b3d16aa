"""Bytes ↔ packets ↔ session. Pure: no socket, thread, disk or clock; what drives it is in `towline.net`."""
