"""Who may call and how calls are kept private: certificates, tokens, names.

Knows nothing of models. What is secret is read from files, again whenever they change, and never written anywhere.
"""
