"""Tests of what both model services share: the queue of calls, the turns at the model, its worker."""
