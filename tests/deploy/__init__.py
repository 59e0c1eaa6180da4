"""Tests of manifests, dashboards and alerts. No cluster is needed."""
