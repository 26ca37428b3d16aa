"""End-to-end receipts, the gateway's side and what both sides share (docs/receipts.md).

keys        who may say what: shared keys, and the codes made with them
mark        what a publisher writes on a message
payload     what a gateway answers, and which opening of a publisher's journal gave out each of its numbers
ledger      what a gateway knows of its publishers: decisions only
sender      sends what the ledger has to say
"""
