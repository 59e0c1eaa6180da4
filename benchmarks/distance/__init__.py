"""Services far from their coordinator: what the distance costs, and what prepared rounds save of it.

`measuring` runs the work, `result` has what it finds, `report` shows it.
"""
