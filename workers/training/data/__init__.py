"""The data that drafts are trained on: chats, sequences of tokens, and the target's hidden
states."""
