"""Language and time: tokens, text, chat, admission, scheduling."""
