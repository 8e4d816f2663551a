"""Counters, histograms and timelines, as every process keeps them."""
