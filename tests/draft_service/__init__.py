"""Tests of what the draft service does beside calls: drafts prepared, and when it pauses."""
