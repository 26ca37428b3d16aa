"""End-to-end receipts, the gateway's side and what both sides share (docs/receipts.md)."""
