"""Subscribe, answer and acknowledge with Towline's own MQTT client; needs no Spark.

    python examples/mqtt_client.py mqtt://127.0.0.1:1883 --count 3

Every message to requests/... is answered where it asks to be answered, and acknowledged when the broker has the answer:
killed at any moment, the example loses no request. The last line it prints tells how many it has answered.
"""

from __future__ import annotations

import argparse

from towline import Client, Filter


def serve(uri: str, client_id: str, count: int) -> int:
    """Answer `count` requests and return how many there were."""
    answered = 0
    with Client(uri, client_id=client_id, subscribe=[Filter("requests/#", qos=1)]) as client:
        print(f"online at {uri}", flush=True)
        for message in client:
            if message.payload is None:  # too large, see docs/publishers.md#client: nothing to answer
                message.ack()
                continue
            topic = message.response_topic or "answers/" + message.topic.removeprefix("requests/")
            answer = client.publish(topic, message.payload.upper(), correlation_data=message.correlation_data)
            answer.result(10)  # the broker has it
            message.ack()  # and only now may it forget the request
            answered += 1
            if answered == count:
                break
    return answered


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="Answer MQTT requests in capitals.")
    parser.add_argument("uri", help="the broker, such as mqtt://127.0.0.1:1883")
    parser.add_argument("--client-id", default="towline-example", help="names the session at the broker")
    parser.add_argument("--count", type=int, default=0, help="end after so many requests; 0 for never")
    given = parser.parse_args()
    print(f"{serve(given.uri, given.client_id, given.count)} answered")


if __name__ == "__main__":
    main()
