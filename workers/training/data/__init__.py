"""Training data for drafts: chats, sequences of tokens, and the target's hidden states."""
