"""Headers of an MQTT message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import format_trace_id, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from towline.bridge.properties import TRACE_CONTEXT, property_headers, user_header, user_property
from towline.schema import OPTIONAL_COLUMNS

RARE = ("retain", *OPTIONAL_COLUMNS)
text = st.text(st.characters(codec="utf-8"), max_size=6)


@given(text | st.sampled_from(TRACE_CONTEXT))
def test_the_header_of_a_user_property_says_which_it_was(key: str) -> None:
    assert user_property(user_header(key)) == key
    assert user_property("mqtt.topic") is None


def test_trace_context_has_the_names_that_consumers_look_for() -> None:
    """OpenTelemetry's propagator of W3C Trace Context, with the headers of a record as its carrier."""
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    users = [{"key": "traceparent", "value": parent}, {"key": "tracestate", "value": "a=b"}]
    nothing = dict.fromkeys(RARE)
    headers = property_headers(b"t", 1, 0, {**nothing, "user_properties": users})
    carrier = {name: (value or b"").decode() for name, value in headers}
    span = get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    assert format_trace_id(span.trace_id) == parent.split("-")[1]
    assert span.trace_state.to_header() == "a=b"
