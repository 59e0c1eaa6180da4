"""Certificates, tokens and names: they decide who may call and keep calls private. Knows nothing of models.

Secrets are read from files, read again when the files change, and never written anywhere.
"""
