"""End-to-end receipts, the gateway's side and what both sides share (docs/receipts.md).

keys        who may say what: shared keys, and the codes made with them
mark        what a publisher writes on a message
openings    which opening of a publisher's journal gave out each of its numbers
payload     what a gateway answers
ledger      what a gateway knows of its publishers: decisions only
sender      sends what the ledger has to say
"""
