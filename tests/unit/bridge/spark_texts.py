"""How Spark 4.3.0 says that its Kafka source misses records: taken once from queries on a real Kafka 4.3.1.

The connector is spark-sql-kafka-0-10_2.13 4.2.0, ``failOnDataLoss=true``, ``StreamingQuery.exception()`` as text; what
follows it, the query's state and plan, is left out. No error class stands in any of them.
"""

from __future__ import annotations

from typing import Final

SPARK: Final = "4.3.0"
_HEAD: Final = (
    "Some data may have been lost because they are not available in Kafka any more;\n"
    "either the data was aged out by Kafka or the topic may have been deleted before all the data in the\n"
    "topic was processed.\n"
    "If you don't want your streaming query to fail on such cases, set the source option failOnDataLoss to false.\n"
    "Reason: "
)
#: Retention has overtaken a stopped query (DeleteRecords), within a batch that was begun and before one; a partition
#: was added, and lost its first records before it was seen.
DATA_LOSS: Final = (
    _HEAD + "Could not read records in offset [5, 15) for topic partition a-0\n"
    "with consumer group spark-kafka-source-55d7225d-2ef5-471d-b32a-5a55d91f31ff--419473941-executor.",
    _HEAD + "Added partition y-1 starts from 3 instead of 0.",
)
#: A topic of a pattern was deleted; one that had come since the last batch was; a topic was made anew and is shorter.
TOPICS_GONE: Final = (
    _HEAD + "Partitions Set(p.two-0) have been deleted.",
    _HEAD + "Cannot find initial offsets for partitions Set(x.two-0). They may have been deleted.",
    _HEAD
    + "Partition h-0 offset was changed from 9 to 3.\nThis could be either 1) a user error that the start offset is "
    "set beyond available offset when starting query, or 2) the kafka topic-partition is deleted and re-created.",
)
