"""End-to-end receipts, the gateway's side and what both sides share (docs/receipts.md).

mark        what a publisher writes on a message, and the keys that say who may say what about it
payload     what a gateway answers, and which opening of a publisher's journal gave out each of its numbers
ledger      what a gateway knows of its publishers, and sends them
"""
