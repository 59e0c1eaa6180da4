"""Tests of the laws of drafts."""
