"""What the README's and the model card's numbers come from. Run by hand; nothing here is a test."""
