"""What a model service needs: bytes by model, conversations and pass, and the settings that fit a budget.

It reads configurations and the headers of weight files, and knows nothing of torch, services and how passes are run.
"""
