"""Counters, histograms, timelines and traces that every process can keep."""
