"""Commands of `towline` that need the proof harness: found by name, so that the product never imports it."""
