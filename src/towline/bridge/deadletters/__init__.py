"""Dead letters: shown, and sent again."""
