"""The making of the built-in pair: data, tokenizer, target, distilled draft, model card.

The product imports nothing from here. This package needs the `engine` extra and a copy of GSM8K's training problems.
"""
