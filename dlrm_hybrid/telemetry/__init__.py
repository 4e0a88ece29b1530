"""Measuring a run: events, metrics, time spans, traffic, sinks and the summary."""
