"""How the built-in pair was made: data, tokenizer, target, distilled draft, model card.

Nothing here is imported by the product; it needs the `engine` extra and a copy of GSM8K's training problems.
"""
