"""Commands of `towline` that need the proof harness; loaded by name, so that the product never imports it."""
