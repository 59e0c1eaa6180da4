"""Other systems, as systems to measure beside ours."""
