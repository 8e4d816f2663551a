"""Drafts: tokens that a step computes as if they were known, and keeps as far as they are right."""
