"""What the gateway and the publisher do with a session: messages in, messages out, receipts."""
