"""End-to-end receipts: the gateway's ledger, and the marks and payloads shared with publishers (docs/publishers.md#receipts)."""
