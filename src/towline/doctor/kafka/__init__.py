"""Whether Kafka can keep what a bridge hands it: what it is asked for, what it says, and what follows from that.

`towline.doctor.kafka.reading` asks; `wanted` says of which topics, and everything that judges is pure. Nothing is
written into a topic of the user's.
"""
