"""Which promises the surroundings of a bridge can keep: measured, before it is started.

An examiner looks at one thing (the broker, Kafka, the disk, the clock, memory) and tells what it found as
`towline.doctor.findings.Finding`, one row of the table each. Nothing is changed but probe topics and sessions of the
doctor's own; everything it makes has a name that begins with ``towline-doctor-``.
"""
