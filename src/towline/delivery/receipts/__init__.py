"""End-to-end receipts: the gateway's ledger, marks and payloads (docs/publishers.md#receipts)."""
